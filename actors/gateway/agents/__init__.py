"""Agents that the gateway starts itself: agent.command, a program for each session, or
agent.function, called in processes of their own.  seats.py: what the two sides say; pushing.py: the
gateway's side.
"""
