from enum import Enum

class DatasetPadMode(str, Enum):
    NO_PADDING = "no_padding"
