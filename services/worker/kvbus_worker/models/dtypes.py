"""How a converted model is stored. Apart from what converts it, so that asking for a prepared model needs no numpy."""

from typing import Literal

StoredDtype = Literal["float32", "bfloat16"]
