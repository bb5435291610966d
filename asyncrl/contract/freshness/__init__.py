"""How far ahead tickets are granted: the window, and what it is measured from."""
