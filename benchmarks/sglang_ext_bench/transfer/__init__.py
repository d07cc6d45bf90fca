"""``bench transfer``: how soon decoding begins, and how fast it goes on, while KV travels from a prefill to a decode server.

    command.py    options, and the run
    methods.py    what is compared, as flags of both servers
    pair.py       both servers, and requests to them
    clocks.py     one request: when its k-th token was there
    summary.py    figures of a method, a link and a context
    tables.py     what is printed, and whether requirements hold
    plots.py      the picture
    accuracy.py   errors of attention outputs, and bits of a number, of each codec
"""
