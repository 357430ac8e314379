#!/usr/bin/env python3
"""The manual page and the completions of the shells, made of what `qconv help --json` prints. Standard library only.

  make_pages.py QCONV FOLDER    writes qconv.1, qconv.bash, qconv.zsh and qconv.fish to FOLDER
"""
import json
import os
import subprocess
import sys

# ---- the manual page, in man(7) macros; its date is left out, as the text depends on the program only ----

DESCRIPTION = (
    "qconv turns a Hugging Face checkpoint into one that is quantized (NF4, int8 or int4, in the forms that "
    "transformers and vLLM load) or cast to 16 bits, in constant memory, with a hash over every byte that it "
    "writes.\n\nResults go to standard output, everything else to standard error.")
ON_OPTIONS = (
    "A value follows its option after a space or after '='. Names cannot be shortened. After '--' every argument is a "
    "path. If an option is given twice, the last one counts, unless it may be repeated. Sizes are written like 5GB "
    "(10^9 bytes each), 512MiB (2^20 bytes each), 1.5GB or 4096.")


def man_text(text):
    """Text in which '-', '\\' and a leading '.' or '\\'' mean themselves. A '-' becomes a minus that can be copied,
    and an empty line ends a paragraph."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        marked = "\\&" if paragraph[:1] in (".", "'") else ""
        paragraphs.append(marked + paragraph.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq"))
    return "\n.PP\n".join(paragraphs)


def man_tagged(tag, text):
    return [".TP", "\\fB%s\\fR" % man_text(tag), man_text(text)]


def man_with(before, commands, everything, after):
    """"With convert, unpack" and what follows it; nothing where these are all commands, or none."""
    if not commands or len(commands) == len(everything):
        return []
    return [before + ", ".join("\\fB%s\\fR" % name for name in commands) + after]


def value_of(option):
    """What follows the name of an option: "N", "{nf4,int8}", or nothing."""
    return option["argument"] or ("{%s}" % ",".join(option["choices"]) if option["choices"] else "")


def man_option(option, commands):
    letter = "\\-%s\\fR, \\fB" % option["letter"] if option["letter"] else ""
    value = value_of(option)
    head = "\\fB%s%s\\fR" % (letter, man_text("--" + option["name"]))
    lines = [".TP", head + (" \\fI%s\\fR" % man_text(value) if value else "")]
    lines.append(man_text(option["help"][:1].upper() + option["help"][1:]) + ".")
    if option["more"]:
        lines.append(man_text(option["more"]))
    if option["default"]:
        lines.append("Default: %s." % man_text(option["default"]))
    if option["default_there"]:
        lines += man_with("Default with ", option["default_differs_with"], commands,
                          ": %s." % man_text(option["default_there"]))
    lines += man_with("Required with ", option["required_with"], commands, ".")
    lines += man_with("With ", option["commands"], commands, ".")
    lines.append("Since %s." % option["since"])
    return lines


def man_page(table):
    commands = [c["name"] for c in table["commands"]]
    lines = ['.\\" Generated from \'qconv help --json\'. Do not edit.',
             '.TH QCONV 1 "" "qconv %s" "User Commands"' % table["version"],
             ".SH NAME", "qconv \\- quantize and convert Hugging Face checkpoints", ".SH SYNOPSIS"]
    for number, command in enumerate(table["commands"]):
        lines += [".br"] * (number > 0) + [".B qconv", man_text(command["usage"])]
    lines += [".SH DESCRIPTION", man_text(DESCRIPTION), ".SH COMMANDS"]
    for command in table["commands"]:
        lines += [".SS " + command["name"], man_text(command["text"])]
    lines.append(".SS Commands of the Python package")
    for command in table["python_commands"]:
        lines += man_tagged(command["name"], command["summary"])
    lines += [".SH OPTIONS", man_text(ON_OPTIONS)]
    for group in table["groups"]:
        lines.append(".SS " + group)
        for option in table["options"]:
            if option["group"] == group:
                lines += man_option(option, commands)
    lines.append(".SH EXIT STATUS")
    for row in table["exit_codes"]:
        lines += man_tagged(row["code"], row["meaning"])
    lines.append(".SH ENVIRONMENT")
    for row in table["environment"]:
        lines += man_tagged(row["name"], row["meaning"])
    lines.append(".SH EXAMPLES")
    for command in table["commands"]:
        examples = (command["examples"] or "").splitlines()
        for example, meaning in zip(examples[::2], examples[1::2]):
            lines += man_tagged(example, meaning)
    return "\n".join(lines + [".SH SEE ALSO", ".BR zstd (1)"]) + "\n"


# ---- completions: commands, the options of the command on the line, choices of their values, and files elsewhere ----


def all_names(table):
    """The commands of the program, and behind them those of the Python package."""
    return [c["name"] for c in table["commands"] + table["python_commands"]]


def quoted(text, zsh_spec=False):
    """Text for between single quotes of a shell. In the specs of zsh ':', '[' and ']' mean something."""
    if zsh_spec:
        for c in "[]:":
            text = text.replace(c, "\\" + c)
    return text.replace("'", "'\\''")


BASH = """# bash completion for qconv. Generated from 'qconv help --json'.
# shellcheck shell=bash
_qconv()
{
    local cur prev word command='' options='' many=''
    cur=${COMP_WORDS[COMP_CWORD]}
    prev=${COMP_WORDS[COMP_CWORD - 1]}
    # "--to=nf4" arrives as three words.
    if [[ $cur == '=' ]]; then
        cur=''
    elif [[ $prev == '=' ]] && ((COMP_CWORD > 1)); then
        prev=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    COMPREPLY=()
    case $prev in
@VALUES@    esac
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in
        @PATTERN@)
            command=$word
            break
            ;;
        esac
    done
    if [[ $cur == -* ]]; then
        case ${command:-convert} in
@OPTIONS@        esac
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
        return
    fi
    if [[ $command == plan ]]; then
        mapfile -t COMPREPLY < <(compgen -f -W '@MODELS@' -- "$cur")
    elif [[ $command != help ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
    if [[ -z $command || $command == help ]]; then
        mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -W '@NAMES@' -- "$cur")
    fi
}
complete -o filenames -F _qconv qconv
"""


CARD_OPTIONS = ("vram", "as")


def model_names(table):
    """Each id, and behind all of them the names without the organisation."""
    return " ".join(table["models"] + [m.split("/", 1)[1] for m in table["models"]])


def bash(table):
    # Rows that share a name take the same kind of value.
    values, seen = "", set()
    for option in table["options"]:
        if option["kind"] == "switch" or option["name"] in seen:
            continue
        seen.add(option["name"])
        values += "        --%s)\n" % option["name"]
        words = {"choice": "-W '%s'" % " ".join(option["choices"]), "file": "-f"}.get(option["kind"])
        if option["name"] in CARD_OPTIONS:  # behind a count: "2xA1"
            values += ('            [[ $cur =~ ^[0-9]+x ]] && many=${BASH_REMATCH[0]}\n'
                       '            mapfile -t COMPREPLY < <(compgen -P "$many" -W \'%s\' -- "${cur#"$many"}")\n'
                       % " ".join(table["cards"]))
        elif words:
            values += '            mapfile -t COMPREPLY < <(compgen %s -- "$cur")\n' % words
        values += "            return\n            ;;\n"
    options = ""
    for command in table["commands"]:
        spelled = []
        for option in table["options"]:
            if command["name"] in option["commands"]:
                spelled.append("--" + option["name"])
                if option["letter"]:
                    spelled.append("-" + option["letter"])
        options += "        %s) options='%s' ;;\n" % (command["name"], " ".join(spelled))
    names = all_names(table)
    return (BASH.replace("@VALUES@", values).replace("@OPTIONS@", options)
            .replace("@PATTERN@", " | ".join(names)).replace("@NAMES@", " ".join(names))
            .replace("@MODELS@", model_names(table)))


ZSH = """#compdef qconv
# zsh completion for qconv. Generated from 'qconv help --json'.
_qconv()
{
    local word command=convert
    local -i named=0
    for word in ${words[2,CURRENT-1]}; do
        case $word in
            @PATTERN@)
                command=$word
                named=1
                words[(i)$word]=()
                CURRENT+=-1
                break
                ;;
        esac
    done
    if (( ! named )) && [[ ${words[CURRENT]} != -* ]]; then
        local -a commands=(
@COMMANDS@        )
        _describe command commands
    fi
    case $command in
@ARGUMENTS@    esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _qconv "$@"
else
    compdef _qconv qconv
fi
"""


def zsh_option(option, cards):
    names = {"name": option["name"], "letter": option["letter"]}
    if option["letter"] and option["repeats"]:
        head = "'*'{-%(letter)s,--%(name)s}'[" % names
    elif option["letter"]:
        head = "'(-%(letter)s --%(name)s)'{-%(letter)s,--%(name)s}'[" % names
    else:
        head = "'%s--%s%s[" % ("*" if option["repeats"] else "", option["name"],
                               "" if option["kind"] == "switch" else "=")
    value = ""
    if option["kind"] != "switch":
        value = ":%s:" % quoted(option["argument"] or option["name"], True)
    if option["name"] in CARD_OPTIONS:
        value += '{compset -P "*+"; compset -P "<->x"; compadd -- %s}' % " ".join(cards)
    value += {"choice": "(%s)" % " ".join(option["choices"]), "file": "_files"}.get(option["kind"], "")
    return "                %s%s]%s' \\\n" % (head, quoted(option["help"], True), value)


def zsh_place(command, name, kind, names, models):
    usage = command["usage"]
    what = "{_files; compadd -- %s}" % models if command["name"] == "plan" else {"path": "_files", "directory": "_files -/", "command": "(%s)" % " ".join(names)}[kind]
    return "                ':%s%s:%s' \\\n" % (":" if "[%s]" % name in usage else "", name, what)


def zsh(table):
    names = all_names(table)
    commands = "".join("            '%s:%s'\n" % (c["name"], quoted(c["summary"], True))
                       for c in table["commands"] + table["python_commands"])
    arguments = ""
    for command in table["commands"]:
        arguments += "        %s)\n            _arguments -s \\\n" % command["name"]
        for option in table["options"]:
            if command["name"] in option["commands"]:
                arguments += zsh_option(option, table["cards"])
        for name, kind in zip(command["places"], command["place_kinds"]):
            arguments += zsh_place(command, name, kind, names, model_names(table))
        arguments += "                && return\n            ;;\n"
    for command in table["python_commands"]:
        arguments += "        %s)\n            _files && return\n            ;;\n" % command["name"]
    return (ZSH.replace("@PATTERN@", "|".join(names)).replace("@COMMANDS@", commands)
            .replace("@ARGUMENTS@", arguments))


FISH = """# fish completion for qconv. Generated from 'qconv help --json'.
function __qconv_command
    for word in (commandline -opc)[2..-1]
        switch $word
            case @NAMES@
                echo $word
                return 0
        end
    end
    return 1
end
function __qconv_is
    set -l command (__qconv_command)
    or set command convert
    contains -- $command $argv
end
function __qconv_cards # behind a count and other devices: "3090+2xA1"
    set -l token (commandline -ct | string replace -r '^--[a-z]+=' '')
    set -l before (string match -r '^(?:.*\\+)?(?:[0-9]+x)?' -- $token)
    for card in $argv
        echo $before$card
    end
end
"""


def fish_option(option, cards):
    line = "complete -c qconv -n '__qconv_is %s' -l %s" % (" ".join(option["commands"]), option["name"])
    if option["letter"]:
        line += " -s " + option["letter"]
    if option["kind"] != "switch":
        line += " -r -F" if option["kind"] == "file" else " -x"
    if option["kind"] == "choice":
        line += " -a '%s'" % " ".join(option["choices"])
    if option["name"] in CARD_OPTIONS:
        line += " -a '(__qconv_cards %s)'" % " ".join(cards)
    return line + ' -d "%s"\n' % option["help"]


def fish(table):
    names = " ".join(all_names(table))
    text = FISH.replace("@NAMES@", names)
    for command in table["commands"] + table["python_commands"]:
        text += "complete -c qconv -n 'not __qconv_command >/dev/null' -a %s -d \"%s\"\n" % (
            command["name"], command["summary"])
    text += "complete -c qconv -n '__qconv_is help' -f -a '%s'\n" % names
    text += "complete -c qconv -n '__qconv_is plan' -a '%s'\n" % model_names(table)
    return text + "".join(fish_option(o, table["cards"]) for o in table["options"])


PAGES = {"qconv.1": man_page, "qconv.bash": bash, "qconv.zsh": zsh, "qconv.fish": fish}


def main(argv):
    if len(argv) != 3:
        sys.exit(__doc__.rstrip())
    table = json.loads(subprocess.run([argv[1], "help", "--json"], check=True, stdout=subprocess.PIPE).stdout)
    os.makedirs(argv[2], exist_ok=True)
    for name, page in PAGES.items():
        with open(os.path.join(argv[2], name), "w", encoding="utf-8") as f:
            f.write(page(table))


if __name__ == "__main__":
    main(sys.argv)
