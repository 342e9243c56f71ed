"""Which weights a server answers with, and the namespaces that follow from them."""

import logging
import secrets
from collections.abc import Callable

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
    It is drawn at once, because weights come in many pieces. When the next request arrives, they are
    digested. Then all servers with these weights have the same fingerprint, and find each other's
    chunks in storage.

    A request that runs while the weights change goes on in the namespace of the old ones, with KV of
    both. So while the tree may hold that, weights that come back keep the fingerprint that was drawn.

    Args:
        identity: A text that differs where the bytes of KV have another meaning, weights aside.
        digest: Digests the weights of this rank.
        config: The server's settings.
        tp_group: Which must agree on a fingerprint.
        quality: By what the answers of the model of the start were judged (profile.quality_of).

    Attributes:
        fingerprint: Of the weights that are loaded now.
        weights: What this rank's weights are called in storage; None until they are digested.
        quality: By what their answers were judged.
        num_updates: How often the weights have changed since the start.
        tp_group: As it was given.
    """

    def __init__(
        self,
        identity: str,
        digest: Callable[[], str],
        config: BlendConfig,
        tp_group: TPGroup,
        *,
        quality: str,
    ) -> None:
        self.identity = identity
        self.quality = quality
        self.num_updates = 0
        self._digest = digest
        self._digested: str | None = None
        self._former: set[ModelFingerprint] = set()
        self._config = config
        self.tp_group = tp_group
        self.weights: str | None = None
        self.fingerprint = ModelFingerprint("")
        self.settle()

    def renew(self) -> None:
        """Take note that the weights have changed; all ranks must be told together."""
        if self.num_updates == 0 and self._config.blend_preset is not None:
            logger.warning("sgl-blend: the weights have changed, quality is %s", NOT_JUDGED)
        self.quality = NOT_JUDGED
        self._former.add(self.fingerprint)
        (nonce,) = self.tp_group.agree([float(secrets.randbits(52))])
        self.num_updates += 1
        self.fingerprint = fingerprint(f"{self.fingerprint} {int(nonce):013x}")
        self.weights = None

    def settle(self) -> bool:
        """Digest the weights if they have changed; return whether they had. All ranks do it together.

        A digest sees samples. Weights that have changed and look the same keep the fingerprint that
        was drawn: nobody else has it, and nothing old is found by it.
        """
        if self.weights is not None:
            return False
        digest, before = self._digest(), self._digested
        agreed = [int(digest[begin : begin + 8], 16) for begin in range(0, len(digest), 8)]
        common = "".join(
            f"{int(part):08x}" for part in self.tp_group.agree(list(map(float, agreed)))
        )
        known = fingerprint(f"{self.identity}\n{common}")
        if common == before or known in self._former:
            self.weights = f"{digest} {self.fingerprint}"
        else:
            self.weights = digest
            self.fingerprint = known
        self._digested = common
        return True

    def tree_was_reset(self) -> None:
        """Note that the tree holds nothing of former weights any more."""
        self._former.clear()

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
