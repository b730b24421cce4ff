"""DFlash2 as a plug-in of SGLang: entry point ``dflash2.integrations.sglang.plugin:register``."""
