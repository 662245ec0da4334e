"""What the process that spawned ranks are forked from imports before all else, and nobody else may.

It ends with the launching process, however that ends, and by a Ctrl-C without a word, although it is in the midst of
imports that take seconds. Ranks put their own handling of signals in the place of this. Named by `parallel.spawn`.
"""

import signal

from imagenet_cls.parallel.ending import signal_when_parent_dies

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal_when_parent_dies(signal.SIGTERM)
