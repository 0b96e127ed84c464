"""halfmoon.store"""
