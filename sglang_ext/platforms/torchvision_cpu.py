"""Makes the CUDA wheel of torchvision loadable with a CPU build of torch.

SGLang imports torchvision before any plugin runs, and the package index only has CUDA builds. Importing one with a CPU build of torch
fails, because two operators are not registered. Declaring their schemas first is enough.

``python -m sglang_ext.platforms.torchvision_cpu`` writes a ``.pth`` file into the folder of installed packages. From then on each
interpreter of that environment has an import hook, which declares the schemas when torchvision is imported.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import sysconfig

PTH_NAME = "sglang_ext_torchvision_cpu.pth"
SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[object] = []


class _DeclareSchemas(importlib.abc.MetaPathFinder):
    """Declares the operators' schemas for a torch built without CUDA, once, when torchvision is first looked up."""

    def find_spec(self, fullname, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "FRAGMENT")
                for name, schema in SCHEMAS.items():
                    if not hasattr(torch.ops.torchvision, name):
                        library.define(schema)
                _libraries.append(library)
        return None


def enable() -> None:
    """Install the import hook in this interpreter."""
    sys.meta_path.insert(0, _DeclareSchemas())


if __name__ == "__main__":
    path = os.path.join(sysconfig.get_paths()["purelib"], PTH_NAME)
    with open(path, "w") as file:
        file.write("import sglang_ext.platforms.torchvision_cpu as m; m.enable()\n")
    print(f"wrote {path}")
