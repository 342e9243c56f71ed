"""What the fork server does last, once it has imported SGLang."""

import gc
import os
import sys

import hook_names

hook_names.install()

# The first fork that imports a module of ours compiles it for all of this run. Nothing is written into
# the checkout, and nothing that an earlier run compiled is read.
sys.pycache_prefix = os.environ["FORKS_COMPILED"]
sys.dont_write_bytecode = False

# SGLang collects garbage when it starts. What was imported is none, and a walk through it would take
# longer than all else in the start of an engine, and copy every page.
gc.collect()
gc.freeze()
