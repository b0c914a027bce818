//! Reads what the builder must know from PTX: version, entries, their parameters, calls.

/// A PTX module, as far as the builder looks at it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ptx {
    /// `8.6`.
    pub(crate) version: String,
    /// `sm_90`.
    pub(crate) target: String,
    pub(crate) entries: Vec<Entry>,
    /// Indirect calls, which the driver can neither inline nor give a stack bound.
    pub(crate) call_prototypes: usize,
}

/// A kernel in PTX.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    /// Calls in the kernel's own body.
    pub(crate) calls: usize,
}

/// A parameter in PTX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Param {
    /// PTX's type: `u64`, `b8[248]`.
    pub(crate) ty: String,
    /// In bytes.
    pub(crate) size: usize,
    /// In bytes.
    pub(crate) align: usize,
}

/// Reads a module that LLVM printed: one directive, parameter or instruction a line.
pub(crate) fn read(text: &str) -> Result<Ptx, String> {
    let mut ptx = Ptx::default();
    let mut in_entry = false;
    for line in text.lines() {
        let line = line.trim();
        if let Some(version) = line.strip_prefix(".version ") {
            ptx.version = version.trim().to_owned();
        } else if let Some(target) = line.strip_prefix(".target ") {
            let arch = target.split([',', ' ']).next().unwrap_or_default();
            ptx.target = arch.to_owned();
        } else if let Some((_, rest)) = line.split_once(".entry ") {
            let name = rest.split(['(', ' ']).next().unwrap_or_default();
            ptx.entries.push(Entry { name: name.to_owned(), ..Entry::default() });
            in_entry = true;
        } else if line.starts_with(".func ") || line.contains(" .func ") {
            in_entry = false;
        } else if line.contains(".callprototype") {
            ptx.call_prototypes += 1;
        }
        let Some(entry) = ptx.entries.last_mut().filter(|_| in_entry) else {
            continue;
        };
        let prefix = format!("{}_param_", entry.name);
        if let Some(declaration) = line.strip_prefix(".param ").filter(|d| d.contains(&prefix)) {
            entry.params.push(param(declaration)?);
        }
        // A call may have a predicate before it.
        let instruction = line.split_whitespace().find(|word| !word.starts_with('@'));
        if instruction.is_some_and(|word| word == "call" || word.starts_with("call.")) {
            entry.calls += 1;
        }
    }
    if ptx.version.is_empty() || ptx.target.is_empty() {
        return Err("it has no .version or no .target".to_owned());
    }
    Ok(ptx)
}

/// Reads `.align 8 .b8 saxpy_param_0[248],` or `.u64 .ptr .align 1 saxpy_param_1`.
fn param(declaration: &str) -> Result<Param, String> {
    let unreadable = || format!("cannot read the parameter declaration `{declaration}`");
    let words: Vec<&str> = declaration.trim_end_matches(',').split_whitespace().collect();
    let element = words
        .iter()
        .find_map(|word| Some((*word, element_size(word.strip_prefix('.')?)?)))
        .ok_or_else(unreadable)?;
    let name = words.last().ok_or_else(unreadable)?;
    let length = match name.split_once('[') {
        Some((_, rest)) => {
            Some(rest.trim_end_matches(']').parse::<usize>().map_err(|_| unreadable())?)
        }
        None => None,
    };
    // `.align` behind `.ptr` is that of what the pointer points to.
    let align = match words.first() {
        Some(&".align") => words.get(1).and_then(|n| n.parse().ok()).ok_or_else(unreadable)?,
        _ => element.1,
    };
    let ty = element.0.trim_start_matches('.');
    Ok(match length {
        Some(n) => Param { ty: format!("{ty}[{n}]"), size: n * element.1, align },
        None => Param { ty: ty.to_owned(), size: element.1, align },
    })
}

fn element_size(ty: &str) -> Option<usize> {
    let bits = ty.strip_prefix(['b', 'u', 's', 'f'])?.parse::<usize>().ok()?;
    [8, 16, 32, 64, 128].contains(&bits).then_some(bits / 8)
}

#[cfg(test)]
mod tests {
    use super::{Param, read};

    const SAMPLE: &str = "
.version 8.6
.target sm_90a, debug
.address_size 64
	// .globl	first
.func  (.param .b32 func_retval0) helper
(
	.param .b64 helper_param_0
)
{
	call.uni foo, (param0);
	ret;
}
.visible .entry first(
	.param .align 8 .b8 first_param_0[248],
	.param .u64 .ptr .align 1 first_param_1,
	.param .f32 first_param_2
)
{
	@%p1 call.uni helper, (param0);
	{ // callseq 0, 0
	.param .b64 param0;
	call (retval0), helper, (param0);
	}
	ret;
}
.visible .entry second()
{
	ret;
}
";

    #[test]
    fn entries_have_the_size_and_alignment_of_their_parameters() {
        let ptx = read(SAMPLE).unwrap();
        assert_eq!((ptx.version.as_str(), ptx.target.as_str()), ("8.6", "sm_90a"));
        assert_eq!(
            ptx.entries[0].params,
            [
                Param { ty: "b8[248]".into(), size: 248, align: 8 },
                Param { ty: "u64".into(), size: 8, align: 8 },
                Param { ty: "f32".into(), size: 4, align: 4 },
            ]
        );
        assert_eq!(ptx.entries[1].name, "second");
        assert!(ptx.entries[1].params.is_empty());
    }

    #[test]
    fn calls_are_counted_in_the_kernel_that_makes_them() {
        let ptx = read(SAMPLE).unwrap();
        assert_eq!((ptx.entries[0].calls, ptx.entries[1].calls), (2, 0));
    }

    #[test]
    fn text_that_is_not_ptx_is_refused() {
        assert!(read("hello").is_err());
    }
}
