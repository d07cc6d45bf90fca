"""Where this plugin enters SGLang: the table of hooks, their application, what forks need, and the bodies of those that stand alone."""
