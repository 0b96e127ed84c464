"""halfmoon.bus"""
