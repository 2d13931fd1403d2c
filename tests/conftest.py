"""One torch thread, as the runs have it: two are slower for small networks, far slower on a busy machine."""

import torch

torch.set_num_threads(1)
