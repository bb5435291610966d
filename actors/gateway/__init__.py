"""Plays sessions of agents and turns their calls into trajectories.

- process: the gateway process
- service: the gateway, which takes tickets, submits calls and delivers trajectories
- session_source: where its sessions come from
- environment_sessions: sessions in environments, which environment_pool runs in worker processes
- session_api: sessions over HTTP, whose event loop is http_gateway
- endpoint: the HTTP server, the routes and the bodies of the model APIs
- agents: programs and functions that play sessions over HTTP
- sessions: one sample with several calls, its limits, retries and end (pure)
- call_tree: which call continues which, and the training sequences (pure)
- chat: messages to token ids, and back
- call_router: assigns calls to generators, whose side is generator_calls
- recovery: open sessions on disk, for a restart
"""
