"""halfmoon.workers"""
