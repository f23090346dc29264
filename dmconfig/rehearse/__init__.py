"""A deployment run before it exists: the pipeline's own code on virtual accelerators, without weights.

skeleton   the pipeline, built from configs on the meta device
standins   tokenizers and processors that are not on this machine
inputs     the arguments of the call
rehearsal  the run, and what it took
margins    what comes on top of tensors
model      the values of a rehearsal
report     a rehearsal as text and as JSON
page       a rehearsal as a page for a browser
settling   plan and rehearsal in turn until they agree; the largest setting that fits
remembered what they agreed on, kept between runs
"""

from dmconfig.rehearse.inputs import Settings as Settings
from dmconfig.rehearse.model import Rehearsal as Rehearsal
from dmconfig.rehearse.page import rehearsal_page as rehearsal_page
from dmconfig.rehearse.rehearsal import Script as Script
from dmconfig.rehearse.rehearsal import rehearse as rehearse
from dmconfig.rehearse.report import rehearsal_data as rehearsal_data
from dmconfig.rehearse.report import rehearsal_schema as rehearsal_schema
from dmconfig.rehearse.report import rehearsal_text as rehearsal_text
