"""Plays sessions of agents and turns their calls into trajectories.

service           the gateway process
session_api, web  sessions over HTTP: the gateway's side, the endpoint
sessions          one sample with several calls: its limits, retries and end (pure)
call_tree         which call continues which, and the training sequences (pure)
chat              messages to token ids, and back
requests, replies, anthropic, responses  the bodies of the model APIs (pure)
call_router       calls to generators; generator_calls: the generators' side
environment_pool  environments in worker processes
agents            programs and functions that play sessions
recovery          open sessions on disk, for a restart
"""
