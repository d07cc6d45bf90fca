"""One file for each attention backend that reads views."""
