//! Writes the list of NCCL's C functions (`functions.rs`) from C prototypes, and parses it.

use anyhow::{Context, Result, bail};
use devcomm_locate::NcclVersion;

use super::headers::{CParam, Prototype};
use super::types;

/// Maximum length of the list's lines.
const WIDTH: usize = 100;

/// The start of the list: a macro that calls the one that declares the functions.
pub(super) const OPENING: &str = "=> { nccl_functions! {\n";
/// The end of the list, and the start of the families: of each, the functions with their types.
pub(super) const FAMILIES: &str = "} };\n}\n\nlist! {\n";

/// The suffixes of functions for a type of elements, and the types.
const ELEMENTS: [(&str, &str); 12] = [
    ("I8", "i8"),
    ("U8", "u8"),
    ("I32", "i32"),
    ("U32", "u32"),
    ("I64", "i64"),
    ("U64", "u64"),
    ("F16", "f16"),
    ("F32", "f32"),
    ("F64", "f64"),
    ("BF16", "bf16"),
    ("F8E4M3", "F8E4M3"),
    ("F8E5M2", "F8E5M2"),
];

/// A function of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// NCCL's name.
    pub name: String,
    /// The parameters, in order.
    pub params: Vec<Param>,
    /// The Rust type of the result.
    pub returns: Option<String>,
    /// The header that declares it.
    pub header: String,
}

/// A parameter of a function of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// The name in snake case.
    pub name: String,
    /// The Rust type.
    pub ty: String,
}

impl Function {
    pub(super) fn of_prototype(prototype: &Prototype) -> Result<Self> {
        let rust = |ty: &str| {
            let name = &prototype.name;
            types::rust_of_c(ty).with_context(|| format!("{name}: `{ty}` has no Rust type yet"))
        };
        let mut params: Vec<Param> = Vec::new();
        for param in &prototype.params {
            let name = param.name.as_deref().map_or_else(|| name_of_type(param), snake_case);
            if params.iter().any(|other| other.name == name) {
                bail!("{}: two parameters are called {name}", prototype.name);
            }
            params.push(Param { name, ty: rust(&param.ty)? });
        }
        let returns = match prototype.returns.as_str() {
            "void" => None,
            ty => Some(rust(ty)?),
        };
        let (name, header) = (prototype.name.clone(), prototype.header.clone());
        Ok(Self { name, params, returns, header })
    }

    /// Returns the family and the type of a function for a type of elements.
    fn family(&self) -> Option<(&str, &'static str)> {
        let (family, suffix) = self.name.rsplit_once('_')?;
        Some((family, ELEMENTS.iter().find(|(of, _)| *of == suffix)?.1))
    }

    /// Returns the declaration of a function, or of the family whose first function this is: each
    /// line has the largest number of parameters that fit.
    fn write(&self, family: Option<usize>) -> String {
        let param = |Param { name, ty }: &Param| match (family, self.family()) {
            (Some(i), Some((_, element))) if *ty == format!("*mut {element}") => {
                format!("{name}: *mut $t{i}")
            }
            _ => format!("{name}: {ty}"),
        };
        let params: Vec<String> = self.params.iter().map(param).collect();
        let returns = self.returns.as_ref().map_or(String::new(), |ty| format!(" -> {ty}"));
        let (begin, end) = match family {
            Some(i) => (format!("    $(fn $f{i}"), ")*"),
            None => (format!("    fn {}", self.name), ""),
        };
        let line = format!("{begin}({}){returns};{end}\n", params.join(", "));
        if line.trim_end().len() <= WIDTH {
            return line;
        }
        format!("{begin}(\n{}    ){returns};{end}\n", wrap(params.iter().map(|p| format!("{p},"))))
    }
}

/// Returns lines of words, each with the largest number that fit.
fn wrap(words: impl Iterator<Item = String>) -> String {
    let (mut lines, mut line) = (String::new(), String::new());
    for word in words {
        if !line.is_empty() && line.len() + word.len() + 1 > WIDTH {
            lines += &format!("{line}\n");
            line.clear();
        }
        line += if line.is_empty() { "        " } else { " " };
        line += &word;
    }
    format!("{lines}{line}\n")
}

/// Returns a name for a parameter without one in the header.
fn name_of_type(param: &CParam) -> String {
    let base = param.ty.split(' ').next().unwrap_or_default().trim_end_matches(['*', '&']);
    let name = snake_case(base.trim_start_matches("nccl").trim_end_matches("_t"));
    match name.as_str() {
        "dev_comm" => "comm".to_owned(),
        "dev_resource_handle" => "handle".to_owned(),
        _ => name,
    }
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() && !snake.ends_with('_') {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

/// Returns the list as text: after the other functions, the families of functions that differ in
/// the type of the elements only.
pub fn write(functions: &[Function], version: NcclVersion) -> String {
    let mut families: Vec<Vec<&Function>> = Vec::new();
    let (mut plain, mut header) = (String::new(), "");
    for function in functions {
        let name = function.family().map(|(name, _)| name);
        if let Some(name) = name {
            let same = |of: &&mut Vec<&Function>| of[0].family().is_some_and(|of| of.0 == name);
            match families.iter_mut().find(same) {
                Some(family) => family.push(function),
                None => families.push(vec![function]),
            }
            continue;
        }
        plain += &section(&mut header, &function.header);
        plain += &function.write(None);
    }
    let (mut patterns, mut typed, mut names) = (Vec::new(), String::new(), String::new());
    for (i, family) in families.iter().enumerate() {
        patterns.push(format!("[$($f{i}:ident $t{i}:ident,)*]"));
        typed += &section(&mut header, &family[0].header);
        typed += &family[0].write(Some(i));
        let pair = |of: &&Function| Some(format!("{} {},", of.name, of.family()?.1));
        names += &format!("    [\n{}    ]\n", wrap(family.iter().filter_map(pair)));
    }
    let generated = format!(
        "// @generated by `cargo xtask raw` from bitcode and headers of NCCL {version}. Do not \
         edit.\n\n"
    );
    let patterns = wrap(patterns.into_iter());
    let list = format!("macro_rules! list {{\n    (\n{patterns}    ) {OPENING}{plain}{typed}");
    generated + &list + FAMILIES + &names + "}\n"
}

/// Returns the line that begins the functions of a header, if it is another one than before.
fn section<'a>(last: &mut &'a str, header: &'a str) -> String {
    if std::mem::replace(last, header) == header {
        return String::new();
    }
    format!("    {header:?}:\n")
}

/// Parses the list.
///
/// # Errors
///
/// If the text is not a list.
pub fn parse(text: &str) -> Result<Vec<Function>> {
    let (_, text) = text.split_once(OPENING).context("this is not a list of functions")?;
    let (body, families) = text.split_once(FAMILIES).context("the list does not end")?;
    let family = |text: &str| -> Result<Vec<(String, String)>> {
        let pair = |pair: &str| {
            let (name, element) = pair.trim().split_once(' ').context("a function has no type")?;
            Ok((name.to_owned(), element.to_owned()))
        };
        text.split(',').filter(|pair| !pair.trim().is_empty()).map(pair).collect()
    };
    let groups = families.split('[').skip(1).map(|group| group.split(']').next());
    let families: Vec<_> = groups.flatten().map(family).collect::<Result<_>>()?;
    let (mut functions, mut header) = (Vec::new(), "");
    let mut declaration = String::new();
    for line in body.lines().map(str::trim) {
        if let Some(name) = line.strip_suffix("\":") {
            header = name.trim_start_matches('"');
            continue;
        }
        declaration += line;
        declaration.push(' ');
        if let Some(whole) = declaration.trim().strip_suffix(";)*") {
            let whole = whole.strip_prefix("$(").context("a family does not begin")?;
            let number = whole.trim_start_matches("fn $f").split('(').next().unwrap_or_default();
            let family = number.parse::<usize>().ok().and_then(|i| families.get(i));
            for (name, element) in family.with_context(|| format!("there is no $f{number}"))? {
                let of = |name: &str| format!("${name}{number}");
                let whole = whole.replace(&of("f"), name).replace(&of("t"), element);
                functions.push(function(&whole, header)?);
            }
        } else if let Some(whole) = declaration.trim().strip_suffix(';') {
            functions.push(function(whole, header)?);
        } else {
            continue;
        }
        declaration.clear();
    }
    if !declaration.trim().is_empty() {
        bail!("`{}` does not end", declaration.trim());
    }
    Ok(functions)
}

fn function(text: &str, header: &str) -> Result<Function> {
    let unreadable = || format!("`{text}` is not a function");
    let (name, rest) =
        text.strip_prefix("fn ").and_then(|t| t.split_once('(')).with_context(unreadable)?;
    let (params, returns) = rest.rsplit_once(')').with_context(unreadable)?;
    let returns = match returns.trim() {
        "" => None,
        text => Some(text.strip_prefix("-> ").with_context(unreadable)?.to_owned()),
    };
    let params = params.split(',').map(str::trim).filter(|param| !param.is_empty());
    let param = |text: &str| {
        let (name, ty) = text.split_once(": ").with_context(unreadable)?;
        Ok(Param { name: name.to_owned(), ty: ty.to_owned() })
    };
    Ok(Function {
        name: name.to_owned(),
        params: params.map(param).collect::<Result<_>>()?,
        returns,
        header: header.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn c_param(ty: &str, name: Option<&str>) -> CParam {
        CParam { name: name.map(str::to_owned), ty: ty.to_owned() }
    }

    fn sum(name: &str, element: &str) -> Prototype {
        let pointer = c_param(&format!("{element}*"), Some("to"));
        Prototype {
            name: name.to_owned(),
            returns: "void".to_owned(),
            params: vec![pointer, c_param("size_t", Some("count"))],
            header: "b/c.h".to_owned(),
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let long = (0..9).map(|i| c_param("uint64_t", Some(&format!("aLongName{i}"))));
        let prototypes = [
            Prototype {
                name: "ncclShort".to_owned(),
                returns: "void*".to_owned(),
                params: vec![c_param("ncclDevComm const&", None), c_param("ncclTeam", Some("tm"))],
                header: "a.h".to_owned(),
            },
            Prototype {
                name: "ncclLong".to_owned(),
                returns: "void".to_owned(),
                params: long.collect(),
                header: "b/c.h".to_owned(),
            },
            sum("ncclSum_I8", "int8_t"),
            sum("ncclSum_F16", "half"),
        ];
        let functions: Vec<Function> =
            prototypes.iter().map(|p| Function::of_prototype(p).unwrap()).collect();
        let text = write(&functions, NcclVersion::from_code(23203));
        assert!(text.contains(
            "    \"a.h\":\n    fn ncclShort(comm: *const DevComm, tm: *const Team) -> \
             *mut c_void;\n"
        ));
        assert!(text.contains("        a_long_name0: u64, a_long_name1: u64,"), "{text}");
        assert!(text.lines().all(|line| line.starts_with("//") || line.len() <= WIDTH), "{text}");
        assert!(text.contains("    $(fn $f0(to: *mut $t0, count: usize);)*\n"), "{text}");
        assert!(text.contains("        ncclSum_I8 i8, ncclSum_F16 f16,\n"), "{text}");
        assert!(text.contains("NCCL 2.32.3"));
        assert_eq!(parse(&text).unwrap(), functions);
    }

    #[test]
    fn a_c_type_without_a_rust_type_is_named_with_its_function() {
        let prototype = Prototype {
            name: "ncclF".to_owned(),
            returns: "void".to_owned(),
            params: vec![c_param("ncclNew*", Some("p"))],
            header: String::new(),
        };
        let error = Function::of_prototype(&prototype).unwrap_err().to_string();
        assert!(error.contains("ncclF") && error.contains("`ncclNew*`"), "{error}");
    }

    #[test]
    fn text_that_is_not_a_list_is_refused() {
        for text in [
            "",
            OPENING,
            &format!("{OPENING} fn a(b);\n{FAMILIES}}}\n"),
            &format!("{OPENING} fn a(\n{FAMILIES}}}\n"),
            &format!("{OPENING} $(fn $f0();)*\n{FAMILIES}}}\n"),
            &format!("{OPENING} $(fn $f0();)*\n{FAMILIES} [ncclA_I8,]\n}}\n"),
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
