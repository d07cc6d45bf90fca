"""The plugin's hooks in SGLang: the table of hooks, their application, the requirements of forks, and hooks without another module."""
