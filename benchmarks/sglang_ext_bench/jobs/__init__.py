"""Jobs that arrive at prefill servers and are decoded elsewhere: how long they take, and where their time goes."""
