"""The gate in the tokenizer process: malformed blend parameters become HTTP 400 here.

Behind it stands the scheduler, which serves everybody and must not see what it cannot decode.
"""

from array import array
from typing import Any

from sgl_blend import sglang_adapter as sglang
from sgl_blend.config import BlendConfig
from sgl_blend.request import check_salt, check_wire_types, locate_chunks, parse_overrides
from sgl_blend.separator import Separator


class RequestGate:
    """Checks the blend parameters of every request of one tokenizer process."""

    def __init__(self, config: BlendConfig, separator: Separator | None) -> None:
        self._config = config
        self._separator_id = None if separator is None else separator.token_id

    def check(self, obj: Any, input_ids: list[int] | None) -> None:
        """Check one request.

        Args:
            obj: SGLang's GenerateReqInput.
            input_ids: Its tokens, separators included.

        Raises:
            RequestError: Something in it is malformed.
        """
        sampling_params = obj.sampling_params or {}
        custom_params = sampling_params.get("custom_params")
        check_wire_types(custom_params)
        check_salt(sglang.client_salt(obj))
        overrides = parse_overrides(custom_params, self._config)
        if input_ids is not None:
            locate_chunks(array("q", input_ids), overrides.offsets, self._separator_id)
