//! The source lines of PTX, from its `.file` and `.loc` directives.

use std::collections::HashMap;

use crate::llvm::is_of_rust;

/// The lines of a module in PTX, and the source files that it names.
#[derive(Debug)]
pub(crate) struct Lines<'a> {
    lines: Vec<&'a str>,
    files: HashMap<&'a str, &'a str>,
}

impl<'a> Lines<'a> {
    pub(crate) fn of(ptx: &'a str) -> Self {
        let lines: Vec<&str> = ptx.lines().map(str::trim).collect();
        let file = |line: &&'a str| {
            let (number, path) = line.strip_prefix(".file")?.trim().split_once(' ')?;
            Some((number, path.trim().trim_matches('"')))
        };
        let files = lines.iter().filter_map(file).collect();
        Self { lines, files }
    }

    pub(crate) fn lines(&self) -> &[&'a str] {
        &self.lines
    }

    /// Returns the user's line that line `index` of the PTX is from, as `file:line:column`: of the
    /// nearest `.loc` before it in its function that is not of Rust's standard library.
    pub(crate) fn place(&self, index: usize) -> Option<String> {
        let before = self.lines.get(..=index)?.iter().rev();
        before.take_while(|line| !line.starts_with("$L__func_begin")).find_map(|line| {
            let mut numbers = line.strip_prefix(".loc")?.split_whitespace();
            let (file, line) = (self.files.get(numbers.next()?)?, numbers.next()?);
            let column = numbers.next()?;
            (line != "0" && !is_of_rust(file)).then(|| format!("{file}:{line}:{column}"))
        })
    }

    /// Returns the user's line where a function first names this symbol.
    pub(crate) fn first_use(&self, symbol: &str) -> Option<String> {
        let is_word = |c: char| c.is_alphanumeric() || "_$.".contains(c);
        let names = |line: &str| line.split(|c| !is_word(c)).any(|word| word == symbol);
        let uses = self.lines.iter().enumerate().filter(|(_, line)| names(line));
        uses.map(|(index, _)| index).find_map(|index| self.place(index))
    }
}

#[cfg(test)]
mod tests {
    use super::Lines;

    const PTX: &str = "
.shared .align 16 .b8 TILE[16];
.visible .entry k()
{
$L__func_begin0:
	.loc	1 5 0
	.loc	1 7 28
	.loc	1 0 28
	.loc	2 1916 50
	mov.b32 	%r1, TILE;
	ret;
$L__func_end0:
}
	.file	1 \"/home/me/kernels/src/lib.rs\"
	.file	2 \"/home/me/.rustup/lib/rustlib/src/rust/library/core/src/cmp.rs\"
";

    #[test]
    fn a_line_is_the_users_and_not_the_standard_librarys() {
        let lines = Lines::of(PTX);
        let at = lines.lines().iter().position(|line| *line == "ret;").unwrap();
        assert_eq!(lines.place(at).as_deref(), Some("/home/me/kernels/src/lib.rs:7:28"));
        assert_eq!(lines.first_use("TILE"), lines.place(at));
        assert_eq!((lines.place(0), lines.first_use("TIL")), (None, None));
    }
}
