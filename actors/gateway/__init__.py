"""The gateway: plays sessions of agents and turns their calls into trajectories.

- service: the gateway, which takes tickets, routes calls and delivers trajectories, and the
  interface of its sources of sessions
- environment_sessions: the gateway process, and sessions in environments, which environment_pool
  runs in worker processes
- session_api: sessions over HTTP, in the event loop of http_gateway: leased, or played by agents
- endpoint: the HTTP server, the routes and the bodies of the model APIs
- agents: programs and functions that play sessions over HTTP
- sessions: one sample with several calls, its limits, retries and end (pure)
- call_tree: how calls continue each other, and the training sequences (pure)
- chat: messages to token ids, and back
- recovery: open sessions on disk, for a restart
"""
