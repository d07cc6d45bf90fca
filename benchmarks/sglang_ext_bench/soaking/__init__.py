"""Mixed traffic for minutes, and checks of every answer."""
