# Completion of slurm-synergy's commands for bash 4.4 and newer.
# Installed as share/bash-completion/completions/{synergyctl,slurm-synergyd}.

_synergyctl() {
    local line
    COMPREPLY=()
    # synergyctl itself knows its commands and options; a line is TYPE,VALUE.
    while IFS= read -r line; do
        case $line in
            plain,*) COMPREPLY+=("${line#plain,}") ;;
            file,*) compopt -o default 2>/dev/null; COMPREPLY=(); return 0 ;;
            dir,*) compopt -o dirnames 2>/dev/null; COMPREPLY=(); return 0 ;;
        esac
    done < <(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \
        _SYNERGYCTL_COMPLETE=bash_complete "${COMP_WORDS[0]}" 2>/dev/null)
}

_slurm_synergyd() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [ "${COMP_WORDS[COMP_CWORD-1]}" = --config ]; then
        compopt -o default 2>/dev/null
        COMPREPLY=()
        return 0
    fi
    # shellcheck disable=SC2207
    COMPREPLY=($(compgen -W "$(slurm-synergyd --help 2>/dev/null | grep -oE -- '--[a-z-]+' | sort -u)" -- "$word"))
}

complete -o nosort -F _synergyctl synergyctl
complete -F _slurm_synergyd slurm-synergyd
