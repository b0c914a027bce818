//! Parses the C prototypes in NCCL's headers.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Macros that give a function C linkage.
const LINKAGE: [&str; 2] = ["NCCL_IR_EXTERN_C", "NCCL_EXTERN_C"];

/// Specifiers that are not part of types.
const SPECIFIERS: [&str; 4] =
    ["__device__", "__host__", "NCCL_DEVICE_INLINE", "NCCL_HOST_DEVICE_INLINE"];

/// A function as a header declares it.
#[derive(Debug, PartialEq, Eq)]
pub struct Prototype {
    pub name: String,
    pub returns: String,
    pub params: Vec<CParam>,
    /// The header's path in `include`.
    pub header: String,
}

/// A parameter in C.
#[derive(Debug, PartialEq, Eq)]
pub struct CParam {
    /// The name in the header.
    pub name: Option<String>,
    /// Normalised: a base type, then `const`, then `*` or `&`.
    pub ty: String,
}

/// Returns every function with C linkage in the device API's headers, in order of paths and lines.
pub fn read(include: &Path) -> Result<Vec<Prototype>> {
    let mut paths = vec![include.join("nccl_device_wrapper.h")];
    find_headers(&include.join("nccl_device"), &mut paths)?;
    paths.sort();
    let mut prototypes: Vec<Prototype> = Vec::new();
    for path in paths {
        let header = path.strip_prefix(include).unwrap_or(&path).display().to_string();
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        for prototype in prototypes_of(&text, &header)? {
            // A definition repeats its declaration.
            if !prototypes.iter().any(|known| known.name == prototype.name) {
                prototypes.push(prototype);
            }
        }
    }
    Ok(prototypes)
}

fn find_headers(folder: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            find_headers(&path, into)?;
        } else if path.extension().is_some_and(|extension| extension == "h") {
            into.push(path);
        }
    }
    Ok(())
}

fn prototypes_of(text: &str, header: &str) -> Result<Vec<Prototype>> {
    let text = without_comments(text);
    let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    let code = code.join("\n");
    let mut prototypes = Vec::new();
    let mut rest = code.as_str();
    while let Some(at) = LINKAGE.iter().filter_map(|name| rest.find(name)).min() {
        rest = &rest[at..];
        let end = end_of_declaration(rest)
            .with_context(|| format!("a declaration in {header} does not end"))?;
        prototypes.push(prototype(&rest[..end], header)?);
        rest = &rest[end..];
    }
    Ok(prototypes)
}

fn without_comments(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("//").into_iter().chain(rest.find("/*")).min() {
        let (before, comment) = rest.split_at(at);
        code += before;
        let end = match comment.starts_with("//") {
            true => comment.find('\n'),
            false => comment.find("*/").map(|end| end + 2),
        };
        rest = end.map_or("", |end| &comment[end..]);
    }
    code + rest
}

/// Returns where a declaration ends: at the semicolon, or at the body's brace, after the
/// parameters' parenthesis.
fn end_of_declaration(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ';' | '{' if depth == 0 => return Some(at),
            _ => {}
        }
    }
    None
}

fn prototype(text: &str, header: &str) -> Result<Prototype> {
    let unreadable = || format!("cannot read `{}` in {header}", text.trim());
    let (head, params) = text.split_once('(').with_context(unreadable)?;
    let params = params.trim_end().strip_suffix(')').with_context(unreadable)?;
    let words = head.split_whitespace().filter(|w| !LINKAGE.contains(w) && !SPECIFIERS.contains(w));
    let head = words.collect::<Vec<_>>().join(" ");
    let (returns, name) = split_name(&head);
    let name = name.with_context(unreadable)?;
    let params = split_params(params).into_iter().map(|text| {
        let (ty, name) = split_name(text.split('=').next().unwrap_or_default().trim());
        CParam { name: name.map(str::to_owned), ty: normalised(ty) }
    });
    let params = params.collect();
    if returns.is_empty() {
        bail!(unreadable());
    }
    Ok(Prototype {
        name: name.to_owned(),
        returns: normalised(returns),
        params,
        header: header.to_owned(),
    })
}

/// Returns a type and an optional name.
fn split_name(text: &str) -> (&str, Option<&str>) {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let ty = text.trim_end_matches(is_of_name);
    let (ty, name) = (ty.trim_end(), &text[ty.len()..]);
    let is_type = ty.split_whitespace().any(|word| word != "const") && !ty.ends_with("::");
    if name.is_empty() || name == "const" || !is_type { (text, None) } else { (ty, Some(name)) }
}

/// Splits at the commas between parameters, not at those in default values.
fn split_params(text: &str) -> Vec<&str> {
    let (mut params, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' | '{' | '<' => depth += 1,
            ')' | '}' | '>' => depth -= 1,
            ',' if depth == 0 => {
                params.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    params.push(&text[start..]);
    params.retain(|param| !param.trim().is_empty());
    params
}

/// Returns the type as [`CParam::ty`]: `const T*` and `T const *` become equal, and a parameter's
/// top-level `const` is removed.
fn normalised(ty: &str) -> String {
    let (pointee, indirection) = match ty.trim().strip_suffix(['*', '&']) {
        Some(pointee) => (pointee, &ty.trim()[ty.trim().len() - 1..]),
        None => (ty, ""),
    };
    let words: Vec<&str> = pointee.split_whitespace().collect();
    let constant = words.contains(&"const") && !indirection.is_empty();
    let base: Vec<&str> = words.into_iter().filter(|word| *word != "const").collect();
    let constant = if constant { " const" } else { "" };
    format!("{}{constant}{indirection}", base.join(" "))
}

#[cfg(test)]
mod tests {
    use super::{CParam, prototypes_of};

    const HEADER: &str = "
#define NCCL_IR_EXTERN_C extern \"C\"
// NCCL_IR_EXTERN_C void commented(int);
/* NCCL_IR_EXTERN_C void commented_too(int); */
NCCL_IR_EXTERN_C NCCL_DEVICE_INLINE ncclResult_t first(
  ncclGin_C* net, ncclDevComm const&, const ncclCoopAny* coop, // the coop
  cuda::memory_order order, ncclHandle const h = {}, ncclLevel l = ncclLevel::Put | f(1, 2));
NCCL_EXTERN_C NCCL_HOST_DEVICE_INLINE bool second(ncclTeam, int bPeer) {
  return third(1);
}
NCCL_IR_EXTERN_C __device__ size_t size();
void other(int);
";

    fn param(ty: &str, name: &str) -> CParam {
        CParam { name: (!name.is_empty()).then(|| name.to_owned()), ty: ty.to_owned() }
    }

    #[test]
    fn prototypes_are_read_in_every_form_that_the_headers_use() {
        let all = prototypes_of(HEADER, "a.h").unwrap();
        let names: Vec<_> = all.iter().map(|p| (p.name.as_str(), p.returns.as_str())).collect();
        assert_eq!(names, [("first", "ncclResult_t"), ("second", "bool"), ("size", "size_t")]);
        let wanted = [
            param("ncclGin_C*", "net"),
            param("ncclDevComm const&", ""),
            param("ncclCoopAny const*", "coop"),
            param("cuda::memory_order", "order"),
            param("ncclHandle", "h"),
            param("ncclLevel", "l"),
        ];
        assert_eq!(all[0].params, wanted);
        assert_eq!(all[1].params, [param("ncclTeam", ""), param("int", "bPeer")]);
        assert_eq!(all[2].params, []);
    }

    #[test]
    fn a_declaration_without_an_end_is_an_error() {
        assert!(prototypes_of("NCCL_IR_EXTERN_C void f(int", "a.h").is_err());
    }
}
