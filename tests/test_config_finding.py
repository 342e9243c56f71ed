"""Settings of finding: what is allowed together."""

import re

import pytest

from sgl_blend.errors import ConfigError
from sgl_blend.settings.config import BlendConfig


@pytest.mark.parametrize("find", ["known", "learned"])
def test_answers_that_depend_on_no_cache_find_marks_only(find: str) -> None:
    with pytest.raises(ConfigError, match=f"^blend_find {find} is not allowed with blend_on_miss"):
        BlendConfig(enable_blend=True, blend_find=find, blend_on_miss="build")


def test_a_share_for_learning_needs_learning() -> None:
    with pytest.raises(ConfigError, match="no effect without blend_find learned"):
        BlendConfig(enable_blend=True, blend_find="known", blend_learn_share=0.1)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    sentence = f"blend_learn_share must be a number in [0, 1], got {share}"
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        BlendConfig(enable_blend=True, blend_find="learned", blend_learn_share=share)
