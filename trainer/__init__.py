"""What runs on each GPU: one training loop over two Protocols, recovery and checkpointing."""

import warnings

# NVRx 0.4.1 installs pynvml, which torch imports and which then asks for its own removal: nothing a user can act on.
warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
# NVRx's Wrapper says so at its end, about loggers of its own.
warnings.filterwarnings("ignore", message="logging not initialized", category=UserWarning)
