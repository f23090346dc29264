"""Problems and plans as text and as JSON: two renderings of the same data. Nothing here prints.

data          the JSON, as records that the published schema is made from
text          the plan as an operator reads it
views         one component with all it could do instead; all strategies side by side
columns       tables as lines of text, wrapped to a width
words         phrases that several views share
stacks        what each device holds, block by block: what a picture draws
"""

from dmconfig.render.data import comparison_data as comparison_data
from dmconfig.render.data import explanation_data as explanation_data
from dmconfig.render.data import plan_data as plan_data
from dmconfig.render.data import problem_data as problem_data
from dmconfig.render.data import problems_data as problems_data
from dmconfig.render.text import plan_text as plan_text
from dmconfig.render.views import comparison_text as comparison_text
from dmconfig.render.views import explanation_text as explanation_text
from dmconfig.render.views import with_own as with_own
