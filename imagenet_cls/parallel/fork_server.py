"""What the process that spawned ranks are forked from imports before all else, and nobody else may.

It ends with the launching process, however that ends, and by a Ctrl-C without a word, although it is in the midst of
imports that take seconds. What asks ranks to stop is none of its business: were it gone, ranks that save would be taken
for dead. Ranks undo this first. Named by `parallel.spawn`.
"""

import signal

from imagenet_cls.parallel.exit import signal_when_parent_dies

if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# Blocked, not ignored: what comes to a rank that has just been forked waits for it.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
signal_when_parent_dies(signal.SIGKILL)
