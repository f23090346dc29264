"""What each error code means, at more length than a report has room for: cause, example, remedy.

``dmconfig explain DM103`` prints one, and ``docs/errors.md`` has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dmconfig.errors import Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a problem of some code comes up, an example of it, and how it is mended.

    Where ``options`` is text, the example is a whole file that has this problem: ``dmconfig validate`` says so with
    these options, or ``dmconfig plan`` where they describe a machine. Otherwise the example is in words.
    """

    cause: str
    example: str
    remedy: str
    options: str | None = ""

    @property
    def command(self) -> str | None:
        """The command that reports it, of the example as ``pipe.yaml``."""
        if self.options is None:
            return None
        verb = "plan" if "--gpus" in self.options else "validate"
        return f"dmconfig {verb} pipe.yaml {self.options}".rstrip()


_HEAD = "version: 1\npipeline:\n  source: black-forest-labs/FLUX.1-dev\n"


def _file(cause: str, lines: str, remedy: str, options: str = "") -> Explanation:
    """Explain by a file: the usual head, with more lines at its end."""
    return Explanation(cause=cause, example=_HEAD + lines, remedy=remedy, options=options)


def _whole(cause: str, text: str, remedy: str) -> Explanation:
    """Explain by a file that has no usual head."""
    return Explanation(cause=cause, example=text, remedy=remedy)


def _words(cause: str, example: str, remedy: str) -> Explanation:
    """Explain what no file alone can show."""
    return Explanation(cause=cause, example=example, remedy=remedy, options=None)


EXPLANATIONS: Mapping[Code, Explanation] = {
    # reading the file
    Code.FILE_UNREADABLE: _words(
        "The file is not there, is a folder, may not be read, or is not UTF-8 text.",
        "dmconfig validate pipe.yml, where the file is called pipe.yaml; or a file that an editor saved as UTF-16.",
        "Check the path, which is relative to the current folder. Save the file as UTF-8; the report names the first "
        "byte that is something else.",
    ),
    Code.SYNTAX: _file(
        "The text is not YAML: a bracket or quote is not closed, a line is indented in a way that fits nothing above "
        "it, a tab indents, or a value begins with a character that means something to YAML. Nothing after such a "
        "place can be read, so it is the only problem reported.",
        "call: {prompt: a cat\n",
        "Look at the place and just above it. Indent with spaces, close what is open, and quote values that hold a "
        "colon and a space, or that begin with one of @ ` % & * ! | > [ {.",
    ),
    Code.DUPLICATE_KEY: _file(
        "One mapping has the same key twice. YAML readers differ in which of the two they keep, most keep the last "
        "without a word, so a value that somebody wrote would be lost.",
        "max_memory:\n  0: 20GiB\n  '0': 10GiB\n",
        "Keep one of the two. The report names both places. 0 and '0' are the same key: all keys are text.",
    ),
    Code.AMBIGUOUS_SCALAR: _file(
        "A word without quotes is a boolean, a number or a date to readers of YAML 1.1, and text to those of YAML 1.2: "
        "yes, no, on, off, 0123, 12:30, 1_000, 2001-01-01.",
        "call:\n  prompt: 12:30\n",
        "Put it in quotes where text is meant ('12:30'), or write the value that is meant: true, false, 123.",
    ),
    Code.UNSUPPORTED_YAML: _file(
        "The text is YAML, but of a kind that a spec has no use for: tags (!!str), keys that are lists or mappings, "
        "several documents in one file, or a merge key (<<) of something that is no mapping.",
        "call:\n  prompt: !!str seven\n",
        "Leave the tag out; quote what is meant as text; give each spec a file of its own.",
    ),
    Code.TOO_LARGE: _file(
        "The file is larger than any spec needs to be: more than 1 MiB of text, 32 levels of nesting, 20 000 values "
        "once aliases are followed, or a number of more than 64 digits. Files that grow without bound when they are "
        "read are refused this way, in milliseconds.",
        f"call:\n  height: {'9' * 70}\n",
        "Make it smaller. A spec names weights and holds none.",
    ),
    Code.FILE_NOT_WRITTEN: _words(
        "A command that writes a spec may not write there: the file exists, its folder does not, or the disk refuses.",
        "dmconfig init ./models/sdxl --out pipe.yaml, where there is a pipe.yaml.",
        "Name another file, or give --force to replace the one that is there. What was there is whole: files are "
        "written beside their place first, and then moved to it.",
    ),
    # overrides
    Code.BAD_OVERRIDE: _file(
        "An override (--set, --call, or overrides= in Python) cannot be read or applied: it is not of the form "
        "key=value, its value is not YAML, or it sets a key inside something that is not a mapping.",
        "device_map: balanced\n",
        "Write the whole path of the key, and quote the assignment for the shell: --set 'device_map.vae=cuda:1'. To "
        "set a key inside a word, set the whole: --set 'device_map={vae: cuda:1, default: balanced}'.",
        "--set device_map.vae",
    ),
    Code.OVERRIDE_CONFLICT: _file(
        "Two overrides set the same value, or one sets a value inside another's. Which one wins would depend on their "
        "order, and the order of overrides never matters.",
        "",
        "Keep one of the two.",
        "--set device_map=cuda:0 --set device_map=cuda:1",
    ),
    # layers of files
    Code.LAYER_CONFLICT: _words(
        "Two files that go together say different things of one key, and neither of them is over the other: two files "
        "under extends, or two overlays. Which one wins would depend on their order.",
        "dmconfig plan base.yaml -f gpu.yaml -f office.yaml, where both overlays set reserve.",
        "Keep one of the two, let one extend the other, or decide in the file that extends both, or with --set.",
    ),
    Code.UNSTATED_MERGE: _file(
        "A list is in two layers, and nothing says how the two go together. Whether lists are added up or replaced is "
        "never guessed.",
        "device_map:\n  transformer: {execution: [cuda:0, cuda:1]}\n  default: balanced\nprofiles:\n"
        "  prod:\n    device_map:\n      transformer: {execution: [cuda:2, cuda:3]}\n",
        "Write !replace before the list to put it in the other's place, or !append to add to the other.",
        "--profile prod",
    ),
    Code.BAD_APPEND: _file(
        "!append adds to a list of a weaker layer, and there is none.",
        "profiles:\n  prod:\n    device_map:\n      transformer: {execution: !append [cuda:1]}\n      default: cpu\n",
        "Leave out !append, or write the whole list with !replace.",
        "--profile prod",
    ),
    Code.BAD_EXTENDS: _file(
        "extends takes the name of a file, relative to this one, or a list of names.",
        "extends: {file: base.yaml}\n",
        "Write extends: base.yaml, or extends: [base.yaml, site.yaml].",
    ),
    Code.EXTENDS_CYCLE: _file(
        "Files extend one another in a circle, so none of them is the base of the others. The report names every step.",
        "extends: pipe.yaml\n",
        "Remove one of the lines that the report names.",
    ),
    Code.BAD_PROFILES: _file(
        "profiles is a mapping from the name of a profile to the keys of this file that differ in it. What is for the "
        "whole file (version, extends, profiles) cannot stand in a profile.",
        "profiles: [prod, test]\n",
        "Write profiles: {prod: {device_map: balanced}}.",
    ),
    Code.UNKNOWN_PROFILE: _file(
        "A profile is chosen, with --profile, profile= or DMCONFIG_PROFILE, that no file has.",
        "profiles: {prod: {reserve: 3GiB}}\n",
        "Choose one of the profiles that the report lists, or add it.",
        "--profile prd",
    ),
    Code.BAD_INTERPOLATION: _file(
        "A $ in a value is not the beginning of a variable: ${NAME}, ${NAME:-default} and ${NAME:?message} are.",
        "call: {prompt: $PLACE at dusk}\n",
        "Write $$ where a $ is meant, and ${NAME} for a variable. Keys have no variables.",
    ),
    Code.UNSET_VARIABLE: _file(
        "A value uses a variable of the environment that is not set, or is empty, and gives no default.",
        "offload_folder: ${DMCONFIG_EXAMPLE_OF_A_FOLDER}\n",
        "Set the variable, or write a default: ${NAME:-./offload}.",
    ),
    # the shape of the spec
    Code.UNSUPPORTED_VERSION: _whole(
        "The file says a version of the format that this dmconfig does not read. A file of a newer version says only "
        "that: its other keys may well be right there.",
        "version: 2\npipeline:\n  source: black-forest-labs/FLUX.1-dev\n",
        "For a newer version, upgrade dmconfig. Otherwise write version: 1, a whole number without quotes.",
    ),
    Code.UNKNOWN_KEY: _file(
        "There is no key of this name at this level of the file. Nothing is ignored in silence, so it is an error.",
        "devise_map: balanced\n",
        "The report lists the keys that are accepted there, and says what was most likely meant: a key in another "
        "spelling, one that belongs to another level, or the word for it in this format. dmconfig explain KEY "
        "documents each.",
    ),
    Code.MISSING_KEY: _whole(
        "A key that has no default is not there, or the file is empty.",
        "version: 1\npipeline: {}\n",
        "Add the key. Every spec has version, and pipeline with source.",
    ),
    Code.WRONG_TYPE: _file(
        "The value is of another kind than the key takes: text where a mapping belongs, a number where text does.",
        "components:\n  vae: ./models/vae-fix\n",
        "The report says what is expected and what is there. Quote numbers that are meant as text: revision: '1234'.",
    ),
    Code.BAD_VALUE: _file(
        "The value is of the right kind, but none of those that the key accepts.",
        "low_memory: model_offload\n",
        "Write one of the values that the report lists.",
    ),
    Code.BAD_DEVICE: _file(
        "The value is not the name of a device, or a device that cannot be used in this place.",
        "device_map: {transformer: cuda0, default: cpu}\n",
        "Write cpu, the number of an accelerator (0), its kind (cuda) or its full name (cuda:0, xpu:1, mps).",
    ),
    Code.DUPLICATE_DEVICE: _file(
        "A device is named twice, in two spellings: 0, '0', cuda, gpu:0 and cuda:0 are one device.",
        "max_memory: {0: 20GiB, cuda:0: 10GiB}\n",
        "Keep one of the two.",
    ),
    Code.BAD_SIZE: _file(
        "The value is not a size. GiB is 2^30 bytes, GB and G are 10^9; units with a small b would be bits.",
        "reserve: 2 gigs\n",
        "Write a whole number of bytes, or a number and a unit: 20GiB, 24GB, 512MiB. A budget of max_memory may also "
        "be 80% (of the device) or free-2GiB.",
    ),
    Code.BAD_DTYPE: _whole(
        "The value is not a floating-point type that weights can be loaded in.",
        "version: 1\npipeline:\n  source: black-forest-labs/FLUX.1-dev\n  dtype: int8\n",
        "Write float32, float16 or bfloat16 (or fp32, fp16, half, bf16), or auto to keep the stored type.",
    ),
    Code.RENAMED_KEY: _whole(
        "The key is called something else here: it is the name that diffusers, accelerate, another tool or an older "
        "version of the format has for it. Its value can stay as it is.",
        "version: 1\npipeline:\n  source: black-forest-labs/FLUX.1-dev\n  torch_dtype: bfloat16\n",
        "Write the new name. dmconfig fix FILE does it in place, and keeps comments and everything else as it is.",
    ),
    # the meaning of the spec
    Code.NOT_SUPPORTED_YET: _file(
        "The file asks for something that dmconfig does not do yet: config values of something else than a scheduler, "
        "weights that are stored quantised in another way than GGUF, a GGUF file in parts or layer by layer, models of "
        "ONNX.",
        "components: {vae: {config: {sample_size: 64}}}\n",
        "Leave it out, or give the component a source with plain weights; the report says which.",
    ),
    Code.UNKNOWN_COMPONENT: _file(
        "A section names a component that the pipeline's class does not have.",
        "device_map: {text_encodr: cuda:1, default: balanced}\n",
        "Write one of the components that the report lists.",
    ),
    Code.MISSING_COMPONENT: _file(
        "The pipeline cannot do without a component that the file leaves out, or that its source does not have.",
        "components: {transformer: null}\n",
        "Remove the null, or give the component a source.",
    ),
    Code.UNKNOWN_CLASS: _whole(
        "The installed diffusers and transformers have no class of this name.",
        "version: 1\npipeline:\n  source: black-forest-labs/FLUX.1-dev\n  class: FluxPipelin\n",
        "Check the spelling, or install the version of the library that has it.",
    ),
    Code.CLASS_MISMATCH: _file(
        "The pipeline does not take a component of this class in this place.",
        "components:\n  vae: {class: CLIPTextModel, source: black-forest-labs/FLUX.1-dev, subfolder: text_encoder}\n",
        "Use a class that the report lists, or another pipeline class.",
    ),
    Code.NOT_A_MODULE: _file(
        "Tokenizers, schedulers and components that are left out have no weights, so they have no place and no dtype.",
        "device_map: {scheduler: cuda:0, default: balanced}\n",
        "Remove the line.",
    ),
    Code.UNPLACED_COMPONENT: _file(
        "A device map without a default has to name every component that has weights; this one leaves some out.",
        "device_map: {transformer: cuda:0}\n",
        "Name the others, or add default: balanced, or default: with one device.",
    ),
    Code.CONTRADICTION: _file(
        "Two parts of the file say things that cannot both be done.",
        "device_map: auto\nlow_memory: sequential_cpu_offload\n",
        "Remove one of the two; the report says what each of them asks for.",
    ),
    Code.UNKNOWN_CALL_ARGUMENT: _file(
        "The pipeline's call has no parameter of this name, or it is one that a file cannot hold.",
        "call: {num_inference_step: 20}\n",
        "Write one of the parameters of the pipeline's __call__. seed makes the generator.",
    ),
    Code.BAD_COMMAND_LINE: _words(
        "Options of the command contradict each other, or one cannot be what it says.",
        "dmconfig plan pipe.yaml --all --explain vae",
        "Keep one of them; the report says which do not go together.",
    ),
    Code.UNKNOWN_MODULE: _file(
        "A key of the device map names a part of a component, and the component has no module of that path.",
        "device_map: {transformer.no_such_blocks: cuda:1, default: cuda:0}\n",
        "Write the path of a module with weights, as named_modules() of the class has it; the report lists the first "
        "level of them.",
        "--gpus 2x80GiB --ram 64GiB",
    ),
    Code.UNKNOWN_SWITCH: _file(
        "A component is given a switch, a cache or an argument that its class, in the libraries as they are installed, "
        "does not have. Other versions may call it otherwise.",
        "components: {transformer: {cache: {class: FirstBlockCacheConfig, config: {treshold: 0.1}}}}\n",
        "Write the name in the report, or one of those that it lists. docs/adapters-and-switches.md has them all.",
    ),
    Code.PLACE_REFUSED: _file(
        "What is asked of a component does not go with the place the file gives it: quantised weights that cannot be "
        "moved, compiled code that would be compiled on every call, weights that are in no file.",
        "quantization: {transformer: bitsandbytes_8bit}\nlow_memory: cpu_offload_with_hook\ndevice_map: cuda:0\n",
        "Give the component another place, or ask for something else; the report says which places there are.",
    ),
    Code.BAD_ADAPTER: _file(
        "A LoRA, textual inversion or IP-Adapter is not there, holds something else, or is for a component that the "
        "pipeline does not have.",
        "adapters: {lora: [{source: ./no-such-lora.safetensors}]}\n",
        "Check source and weight_name. Files are safetensors; convert others.",
    ),
    Code.BAD_QUANTIZATION: _file(
        "A component cannot be quantised as the file says: the backend has no such configuration, or the component "
        "is of a kind that is not quantised.",
        "quantization: {transformer: {quant_backend: torchao, quant_kwargs: {quant_type: int8wo}}}\n",
        "Write a configuration of the backend; a .gguf file is named as the component's source.",
    ),
    Code.MOVING_REVISION: _whole(
        "The revision of a hub id is a branch or a tag, which may name other files tomorrow, or it is left out of a "
        "file that says allow_moving_revision: false.",
        "version: 1\npipeline:\n  source: black-forest-labs/FLUX.1-dev\n  revision: main\n",
        "dmconfig pin FILE writes the commit in. Where the newest files are wanted, add allow_moving_revision: true.",
    ),
    Code.INCOMPATIBLE_PARTS: _whole(
        "Two components do not go together, as their configs say: a denoiser takes other channels than it is given, "
        "text of another width, or a ControlNet was made for another model.",
        "version: 1\npipeline:\n  source: stable-diffusion-v1-5/stable-diffusion-v1-5\n"
        "  class: StableDiffusionInstructPix2PixPipeline\n",
        "Give the component a source that fits, or name the pipeline's class that is made for these weights.",
    ),
    Code.INCOMPATIBLE_DTYPES: _file(
        "Components that hand on what they make as it is are told to be of two dtypes, which torch refuses when they "
        "meet.",
        "  dtype: float16\ncomponents: {text_encoder: {dtype: float32}}\n",
        "Write one dtype for all of those that the report names.",
    ),
    Code.CODE_NOT_TRUSTED: _words(
        "A class is code that a source brings along, or of a package other than diffusers and transformers. Code of a "
        "source is run only where the file says, for that source, why it is trusted.",
        '"unet": ["my_unet", "MyUNet"] in a model_index.json, with unet/my_unet.py beside it.',
        "Read the files that the report names, then write the reason: trust_remote_code: read at this commit by us. "
        "A source on the hub needs a commit as its revision. Or give the component a class of the libraries.",
    ),
    Code.BAD_CODE: _words(
        "Code that a source brings along cannot be used: a file is missing or no Python, it imports from outside its "
        "folder, or it has no class of the kind that is asked for.",
        "custom_pipeline: {source: ./my_pipeline.py, ...}, where the file has two pipeline classes.",
        "Name the class as pipeline.class, or the right file. Code is read, not run, to know this.",
    ),
    Code.BAD_ORIGINAL_CONFIG: _file(
        "original_config is no YAML file of the model's authors, lacks what diffusers makes a config from, or stands "
        "beside weights whose class takes none.",
        "  original_config: ./v1-inference.yaml\n",
        "Remove the line and name a folder or hub id as config; or download the file and name its path.",
    ),
    Code.PICKLE_NOT_TRUSTED: _words(
        "The weights of a component are in a pickle (.bin, .ckpt, .pt), and opening one can run code.",
        "A folder with diffusion_pytorch_model.bin and no safetensors.",
        "Convert it to safetensors on a machine that may be lost, or write the reason why it may be opened: "
        "allow_pickle: our own export of 2022. torch's safe loader opens it all the same.",
    ),
    Code.UNFIT_FOR_MODULAR: _whole(
        "A modular pipeline is made of blocks, which make some components themselves. The file asks for what blocks do "
        "not take, or the source's blocks are none of the installed diffusers.",
        "version: 1\n"
        "pipeline: {source: stabilityai/stable-diffusion-xl-base-1.0, class: StableDiffusionXLModularPipeline}\n"
        "components: {guider: null}\n",
        "Remove the line; class and config change what blocks make. Where the blocks are not known, name a modular "
        "class of diffusers under pipeline.class, whose own blocks are then used.",
    ),
    Code.CONNECTED_NOT_TOLD: _whole(
        "The class is made of several pipelines, and where one of them comes from is told neither by the file nor by "
        "the source's README.md; or the file names one for a class that has none.",
        "version: 1\n"
        "pipeline: {source: kandinsky-community/kandinsky-2-2-decoder, class: KandinskyV22CombinedPipeline}\n",
        "Name it: pipeline.connected: {prior: {source: kandinsky-community/kandinsky-2-2-prior}}.",
    ),
    Code.INPUT_UNREADABLE: _words(
        "A picture, mask or film that the call is to have cannot be read from where the file says it is.",
        "call: {image: ./cat.png}, where there is no cat.png beside the file.",
        "Check the path, which is relative to the file it stands in, and that it is a picture or a film.",
    ),
    # sources and weights
    Code.SOURCE_NOT_FOUND: _whole(
        "What source names is neither a folder nor a hub id, or it is one that is not there.",
        "version: 1\npipeline:\n  source: ./no/such/folder\n",
        "Write a folder as ./folder, relative to the file, and a hub id as organisation/name.",
    ),
    Code.NOT_A_PIPELINE: _whole(
        "The folder holds no pipeline in the layout of diffusers: its model_index.json is missing or damaged.",
        "version: 1\npipeline:\n  source: .\n",
        "Name the folder that has model_index.json. What save_pretrained of a pipeline writes is one.",
    ),
    Code.SOURCE_CLASS_DIFFERS: _words(
        "The file names a class for a component, and the config in its source names another one.",
        "components: {vae: {source: ./models/vae, class: AutoencoderTiny}}, where ./models/vae is an AutoencoderKL.",
        "Leave class out, or name the source that has weights of that class.",
    ),
    Code.WEIGHTS_MISSING: _words(
        "There are no safetensors weights where a component's config is, or none of the variant that is asked for.",
        "pipeline: {source: ./models/sdxl, variant: fp16}, where no file is called *.fp16.safetensors.",
        "Copy the folder again, whole; or name a variant that is there. Pickled weights (.bin, .ckpt) are not read: "
        "save the pipeline with save_pretrained, which writes safetensors.",
    ),
    Code.WEIGHTS_CORRUPT: _words(
        "A weights file is not whole, or its header does not agree with its length.",
        "A download that was interrupted, or a Git LFS pointer in place of a file of weights.",
        "Fetch the file again. For a clone of a repository, git lfs pull gets the files themselves.",
    ),
    Code.SIZES_UNKNOWN: _whole(
        "Nothing here says how large a component is: its weights are not on this machine, and the packaged catalogue "
        "does not have it.",
        "version: 1\npipeline:\n  source: some-organisation/some-pipeline\n",
        "Load it once, which downloads what it needs, or ask the hub with dmconfig plan --hub.",
    ),
    Code.DOWNLOAD_FAILED: _words(
        "The hub did not give what was asked for: no network, no such repository or revision, or no permission.",
        "dmconfig run pipe.yaml without a network, when the pipeline is not in the local cache.",
        "The report says what the hub answered. For a gated repository accept its terms on its page, and set HF_TOKEN.",
    ),
    Code.OUTSIDE_SOURCE: _file(
        "A subfolder, or a link in a folder, leads to files outside the source that the file names.",
        "components: {vae: {subfolder: ../vae}}\n",
        "Name the folder that has the files as the source, or copy them. The hub cache's own links are fine.",
    ),
    Code.DOWNLOAD_DIFFERS: _words(
        "What was downloaded has another size or hash than the hub says; it has been removed.",
        "A proxy that answers with a page of its own.",
        "Run it again. If it comes back, look at the proxy or mirror between this machine and the hub.",
    ),
    Code.CONFIG_NOT_FOUND: _words(
        "The source is one file of weights, and nothing tells the configs that go with them.",
        "source: ./my-model.safetensors, whose tensors have names of no well-known pipeline.",
        "Write config: with the folder or hub id of a pipeline, or of a model, that has the same configs.",
    ),
    # machine and plan
    Code.NO_SUCH_DEVICE: _file(
        "The file names a device that the machine does not have.",
        "device_map: cuda:1\n",
        "Name a device that is there, or plan for the machine that has it: --gpus 2x24GiB. CUDA_VISIBLE_DEVICES hides "
        "devices and numbers the others anew.",
        "--gpus 24GiB --ram 64GiB",
    ),
    Code.BAD_MACHINE: _file(
        "The description of a machine, in options or in a machine file, cannot be read, or contradicts itself.",
        "",
        "Write sizes or cards: --gpus 2x24GiB, --gpus rtx-4090, --ram 64GiB.",
        "--gpus many --ram 64GiB",
    ),
    Code.DOES_NOT_FIT: _file(
        "No placement that the file allows fits this machine.",
        "device_map: cuda:0\n",
        "The report says what is needed, what each device offers, and the smallest changes that help. dmconfig plan "
        "--all sets all strategies side by side.",
        "--gpus 8GiB --ram 64GiB",
    ),
    # building, placing, running
    Code.COMPONENT_NOT_LOADED: _words(
        "The class of a component failed to load it. The report has the library's own words.",
        "A config that was written by a newer diffusers than the one installed.",
        "Look at the cause in the report. dmconfig doctor prints the versions of all libraries.",
    ),
    Code.ADAPTER_NOT_LOADED: _words(
        "diffusers refused an adapter, or none of its layers is one of the pipeline's. Nothing stays loaded.",
        "A LoRA that was trained for FLUX, on a Stable Diffusion pipeline.",
        "Look at the cause and the file in the report, and use an adapter that was trained for this pipeline.",
    ),
    Code.SWITCH_NOT_APPLIED: _words(
        "The class of a component refused a switch when it was set. Nothing stays loaded.",
        "attention_slicing: 64, on a denoiser whose attention has 8 heads.",
        "Look at the cause in the report, and change the value of the switch.",
    ),
    Code.PACKAGE_MISSING: _words(
        "What the file asks for takes a package that is not installed here, or is too old. Plans do without it.",
        "quantization: {transformer: torchao}, where torchao is not installed.",
        "Install the package as the report says.",
    ),
    Code.PLACEMENT_DIFFERS: _words(
        "A component is not where the plan says, or a pipeline is not placed by dmconfig any more.",
        "pipe.unet.to('cpu') after loading, and then dmconfig.report(pipe).",
        "Load the pipeline again, and change its parts with dmconfig.swap and dmconfig.derive.",
    ),
    Code.CALL_FAILED: _words(
        "The pipeline was loaded and placed, and its own call failed. The report has the error.",
        "dmconfig run pipe.yaml --call height=100, with a pipeline that wants multiples of 8.",
        "Look at the error. With DMCONFIG_TRACEBACK=1 in the environment it shows where it comes from.",
    ),
    Code.OUTPUT_NOT_WRITTEN: _words(
        "What a command made could not be written.",
        "dmconfig run pipe.yaml --out /picture.png, as a user who may not write there.",
        "Name a file in a folder that can be written to.",
    ),
    Code.BAD_OFFLOAD_FOLDER: _words(
        "The offload folder cannot be written to, or has no room for the weights that are to rest there.",
        "offload_folder: /dev/shm/offload, with 4 GiB of it free and 20 GiB to rest there.",
        "Name a folder on a larger disk, or load in the stored dtype, which needs no copy.",
    ),
    Code.TRANSFER_FAILED: _words(
        "Bytes do not survive copies between accelerators of this machine: some deliver zeros without an error.",
        "A host with an IOMMU that breaks copies between cards, or a driver that does.",
        "Run dmconfig doctor, and follow what the report says of the pair of devices.",
    ),
    Code.REHEARSAL_FAILED: _words(
        "A rehearsal that a plan or a sweep needs ended before it had a result: the process in which it ran was "
        "stopped, mostly because the host had no memory left, or fell over something that is a fault of dmconfig.",
        "dmconfig plan pipe.yaml --rehearse, on a machine with very little free memory.",
        "Look at what it printed above; free some memory and try again. If it is no matter of memory, please report "
        "it with the output of the same command.",
    ),
    Code.REHEARSAL_DISAGREES: _words(
        "The reserve is to be rehearsed, and no plan was found whose own rehearsal needs no more than it keeps free: "
        "with more room for activations the weights go elsewhere, where the activations take more again.",
        "reserve: rehearsed, with a device_map that leaves no room for what the decoder takes.",
        "Write a reserve in bytes, at least what the report names; ask for a smaller picture under call; or let "
        "weights rest elsewhere with low_memory.",
    ),
}
"""One for every code."""
