"""The admission window, and the meter of the times from which it follows."""
