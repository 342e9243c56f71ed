"""Which weights a server answers with, and the namespaces that follow from them."""

import logging
import secrets

from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.radix_ext.namespaces import (
    ModelFingerprint,
    blend_salt,
    chunk_salt,
    fingerprint,
    shadow_salt,
)
from sgl_blend.settings.config import BlendConfig
from sgl_blend.settings.preset import NOT_JUDGED

logger = logging.getLogger(__name__)


class LoadedModel:
    """The model as it is now; owned by the scheduler thread.

    KV of other weights must never be found again, whether or not the operator had the cache flushed.
    So every change of weights gives the model another fingerprint, which is in every namespace of ours.

    Args:
        fingerprint: Of the model that was loaded at start.
        config: The server's settings.
        tp_group: Which must agree on a new fingerprint.
        quality: By what the answers of that model were judged (profile.quality_of).

    Attributes:
        fingerprint: Of the weights that are loaded now.
        quality: By what their answers were judged.
        num_updates: How often the weights have changed since the start.
    """

    def __init__(
        self, fingerprint: ModelFingerprint, config: BlendConfig, tp_group: TPGroup, *, quality: str
    ) -> None:
        self.fingerprint = fingerprint
        self.quality = quality
        self.num_updates = 0
        self._config = config
        self._tp_group = tp_group

    def renew(self) -> None:
        """Take note that the weights have changed; all ranks must be told together.

        Nothing cheap tells new weights from old ones, so the fingerprint is drawn: it will not meet
        that of any other server or time. A profile was made with the weights of the start.
        """
        if self.num_updates == 0 and self._config.blend_preset is not None:
            logger.warning("sgl-blend: the weights have changed, quality is %s", NOT_JUDGED)
        self.quality = NOT_JUDGED
        (nonce,) = self._tp_group.agree([float(secrets.randbits(52))])
        self.num_updates += 1
        self.fingerprint = fingerprint(f"{self.fingerprint} {int(nonce):013x}")

    def chunk_namespace(self, client_salt: str | None) -> str:
        """Name the namespace in which a client's chunks are stored."""
        return chunk_salt(self.fingerprint, client_salt)

    def shadow_namespace(self, client_salt: str | None) -> str:
        """Name the namespace of full prefills by the present weights alone."""
        return shadow_salt(self.fingerprint, client_salt)

    def blended_namespace(
        self, client_salt: str | None, *, policy: str, ratio: float, serial: int | None
    ) -> str:
        """Name the namespace of requests blended in one way.

        Args:
            client_salt: The client's own salt.
            policy: Selection policy.
            ratio: Recompute ratio.
            serial: A number that no other request has, to share with nobody; None to share.
        """
        return blend_salt(
            self.fingerprint,
            client_salt,
            policy=policy,
            ratio=ratio,
            check_layer=self._config.blend_check_layer,
            serial=serial,
        )
