"""halfmoon.cli"""
