"""modelstate moves model state between files and live PyTorch models: all or nothing, with every reference kept."""

from modelstate.place.load_state_dict import load_state_dict as load_state_dict
