//! Parses PTX as far as the builder needs: version, entries, parameters, calls.

/// A parsed PTX module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ptx {
    /// `8.6`.
    pub(crate) version: String,
    /// `sm_90`.
    pub(crate) target: String,
    /// The kernels.
    pub(crate) entries: Vec<Entry>,
    /// All defined functions, including kernels.
    pub(crate) functions: Vec<Function>,
    /// Number of indirect calls, which the driver cannot inline, and whose stack it cannot bound.
    pub(crate) call_prototypes: usize,
}

/// A kernel in PTX.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
}

/// A function with a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// The target of each call: a function, or the register of an indirect call.
    pub(crate) calls: Vec<String>,
    /// The function's own local memory, in bytes.
    pub(crate) stack: usize,
}

/// A parameter in PTX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Param {
    /// PTX's type: `u64`, `b8[248]`.
    pub(crate) ty: String,
    /// The size in bytes.
    pub(crate) size: usize,
    /// The alignment in bytes.
    pub(crate) align: usize,
}

/// Parses a module printed by LLVM: one directive, parameter or instruction per line.
pub(crate) fn read(text: &str) -> Result<Ptx, String> {
    let mut ptx = Ptx::default();
    let mut in_entry = false;
    let mut function = Function::default();
    // Nesting depth of braces after the line: inline assembly may have blocks in a body.
    let mut depth = 0;
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
            function = Function { name: name.to_owned(), ..Function::default() };
            in_entry = true;
        } else if line.starts_with(".func ") || line.contains(" .func ") {
            function = Function { name: function_name(line).to_owned(), ..Function::default() };
            in_entry = false;
        } else if line.contains(".callprototype") {
            ptx.call_prototypes += 1;
        } else if line.starts_with(".local ") {
            function.stack += param(line.trim_start_matches(".local ").trim_end_matches(';'))?.size;
        }
        function.calls.extend(called(line).map(str::to_owned));
        let code = line.split("//").next().unwrap_or_default();
        if !code.starts_with(".file") {
            let outer = depth;
            depth += code.matches('{').count();
            depth = depth.saturating_sub(code.matches('}').count());
            // A declaration has no body.
            if depth == 0 && outer > 0 {
                ptx.functions.push(std::mem::take(&mut function));
            }
        }
        let Some(entry) = ptx.entries.last_mut().filter(|_| in_entry) else {
            continue;
        };
        let prefix = format!("{}_param_", entry.name);
        if let Some(declaration) = line.strip_prefix(".param ").filter(|d| d.contains(&prefix)) {
            entry.params.push(param(declaration)?);
        }
    }
    if ptx.version.is_empty() || ptx.target.is_empty() {
        return Err("it has no .version or no .target".to_owned());
    }
    Ok(ptx)
}

/// Returns a module without its line tables: `.loc` and `.file` directives, and debug sections.
pub(crate) fn without_line_tables(text: &str) -> String {
    let mut in_section = false;
    let is_kept = |line: &&str| {
        let word = line.split_whitespace().next();
        in_section |= word == Some(".section") && line.contains(".debug_");
        let is_kept = !in_section && !matches!(word, Some(".loc" | ".file"));
        in_section &= !line.contains('}');
        is_kept
    };
    text.split_inclusive('\n').filter(is_kept).collect()
}

/// Returns a module without comments, indentation, and the labels of its line tables.
///
/// `ptxas` starts a basic block at such a label: from the result it makes other machine code, of
/// the same size, than from the module with them.
pub(crate) fn compact(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("$L__tmp"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Returns the name in `.func  (.param .b32 func_retval0) name(`.
fn function_name(line: &str) -> &str {
    let (_, rest) = line.split_once(".func ").unwrap_or_default();
    let rest = rest.trim_start();
    let name = match rest.strip_prefix('(') {
        Some(result) => result.split_once(')').unwrap_or_default().1,
        None => rest,
    };
    name.trim_start().split(['(', ' ']).next().unwrap_or_default()
}

/// Returns the call target of a line: `name` of `@%p1 call.uni (retval0), name, (param0);`.
fn called(line: &str) -> Option<&str> {
    // A call may have a predicate before it.
    let call = match line.strip_prefix('@') {
        Some(_) => line.split_once(' ')?.1.trim_start(),
        None => line,
    };
    let (instruction, operands) = call.split_once(' ')?;
    if instruction != "call" && !instruction.starts_with("call.") {
        return None;
    }
    let operands = operands.trim_start();
    let operands = match operands.strip_prefix('(') {
        Some(result) => result.split_once(')')?.1.trim_start_matches([',', ' ']),
        None => operands,
    };
    operands.split([',', ';', ' ']).next()
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
    // `.align` after `.ptr` is the pointee's.
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
    use super::{Function, Param, read};

    const SAMPLE: &str = "
.version 8.6
.target sm_90a, debug
.address_size 64
	// .globl	first
.extern .func foo
(
	.param .b64 foo_param_0
)
;
.func  (.param .b32 func_retval0) helper(
	.param .b64 helper_param_0
)
{
	.local .align 8 .b8 	__local_depot0[24];
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
	} // callseq 0
	{
	.reg .pred p;
	}
	call (retval0), %rd1, (param0), prototype_0;
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
        let function = |name: &str, calls: &[&str], stack| Function {
            name: name.to_owned(),
            calls: calls.iter().map(|name| name.to_string()).collect(),
            stack,
        };
        let wanted = [
            function("helper", &["foo"], 24),
            function("first", &["helper", "helper", "%rd1"], 0),
            function("second", &[], 0),
        ];
        assert_eq!(ptx.functions, wanted);
    }

    #[test]
    fn text_that_is_not_ptx_is_refused() {
        assert!(read("hello").is_err());
    }
}
