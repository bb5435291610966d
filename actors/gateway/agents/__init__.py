"""Agents that the gateway starts (agent.command and agent.function).

session_messages.py holds the messages between their processes and the gateway, agent_pool.py the
gateway's side.
"""
