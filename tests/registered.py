"""Registers the tests' own network with timm when it is imported, as a user's module under
`imports` does.
"""

from typing import Any

import helpers
from timm.models import register_model


@register_model
def helpers_registered(
    pretrained: bool = False, num_classes: int = 10, **more_from_timm: Any
) -> Any:
    return helpers.plain(num_classes)
