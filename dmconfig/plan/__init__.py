"""Where every component's weights rest and where it runs: decided before a weight is read, without torch.

planner       the way in: ``make_plan``
model         the values it returns
requests      what the file asks for each component
task          spec, assembly, sizes and machine as one value, and what follows from them
uses          what devices hold under a placement
placement     the search behind ``balanced`` and its relatives, which ``preferences`` tell apart
calls, prices how often components run, and what places cost
fastest       the search behind ``auto``
split         components in parts
reasons       why each component is where it is
misfits       why nothing fits, and what would help
alternatives  what else there is
"""

from dmconfig.plan.alternatives import Alternative as Alternative
from dmconfig.plan.alternatives import Comparison as Comparison
from dmconfig.plan.alternatives import alternatives_of as alternatives_of
from dmconfig.plan.alternatives import compare as compare
from dmconfig.plan.model import Assignment as Assignment
from dmconfig.plan.model import DeviceUse as DeviceUse
from dmconfig.plan.model import Part as Part
from dmconfig.plan.model import Plan as Plan
from dmconfig.plan.model import Proof as Proof
from dmconfig.plan.model import Residency as Residency
from dmconfig.plan.planner import make_plan as make_plan
from dmconfig.plan.planner import make_task as make_task
