"""What the fork server does last, once it has imported SGLang."""

import hook_names

hook_names.install()
