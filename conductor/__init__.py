"""halfmoon.conductor"""
