"""dash: machine, runs, plans, score, server and claims as pages, for one person on one machine.

It reads what the other rooms have written and changes nothing. :func:`create_app` in
``app.py`` makes the application, ``guard.py`` decides who may see it.
"""
