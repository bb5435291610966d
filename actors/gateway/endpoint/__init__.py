"""The HTTP endpoint: its server, its routes, and the bodies of the model APIs."""
