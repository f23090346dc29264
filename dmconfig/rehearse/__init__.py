"""A deployment run before it exists: the pipeline's own code on virtual accelerators, without weights.

skeleton   the pipeline, built from configs on the meta device
standins   tokenizers and processors that are not on this machine
inputs     the arguments of the call
rehearsal  the run, and what it took
margins    what comes on top of tensors
model      the values of a rehearsal
"""

from dmconfig.rehearse.inputs import Settings as Settings
from dmconfig.rehearse.model import Rehearsal as Rehearsal
from dmconfig.rehearse.rehearsal import Script as Script
from dmconfig.rehearse.rehearsal import rehearse as rehearse
