"""What pipeline and model classes say of themselves, read from source: nothing is imported to know it.

Importing diffusers costs seconds; ``validate`` and ``plan`` need only a few facts of a few classes. They are
read with ``ast`` from the installed packages and kept in the user's cache folder, one small file per class.
The integration tests compare every fact with what importing says.

    records     the facts as values
    installed   where the packages are, and what identifies their state
    cache       facts kept on disk between runs
    index       all class statements of a package, found by a pattern
    source      modules, names and inheritance, read from source
    expression  values and annotations written in source
    reading     one class in source -> its facts
    modular     the same for modular pipelines, which are told by their blocks
    lookup      the functions of this package: memory, then disk, then source
    fitting     may this class be given for that component?
"""

from __future__ import annotations

from dmconfig.facts.fitting import fits
from dmconfig.facts.lookup import (
    class_facts,
    classes_with_original_config,
    dataclass_fields,
    known_attention_backends,
    known_modular_pipelines,
    known_pipelines,
    known_schedulers,
    method_parameters,
    own_class_facts,
    own_method_parameters,
    own_pipeline_facts,
    own_pipelines,
    pipeline_facts,
)
from dmconfig.facts.records import (
    CallParameter,
    ClassFacts,
    CodeFile,
    CodeFiles,
    ComponentSlot,
    Json,
    PipelineFacts,
    is_module_class,
    is_scheduler_class,
)

__all__ = [
    "CallParameter",
    "ClassFacts",
    "CodeFile",
    "CodeFiles",
    "ComponentSlot",
    "Json",
    "PipelineFacts",
    "class_facts",
    "classes_with_original_config",
    "dataclass_fields",
    "fits",
    "is_module_class",
    "is_scheduler_class",
    "known_attention_backends",
    "known_modular_pipelines",
    "known_pipelines",
    "known_schedulers",
    "method_parameters",
    "own_class_facts",
    "own_method_parameters",
    "own_pipeline_facts",
    "own_pipelines",
    "pipeline_facts",
]
