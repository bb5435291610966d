"""Agents that the gateway starts.

They are programs (agent.command), functions (agent.function) and environments that call the policy
themselves. session_messages.py holds the messages between their processes and the gateway,
http_gateway.py the gateway's side.
"""
