"""Answers to what workers, clients and other agents ask of a store agent."""
