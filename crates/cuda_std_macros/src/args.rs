//! Parses the arguments of `#[kernel(..)]`.

use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{
    Error, Expr, GenericArgument, Ident, LitInt, LitStr, Result, Token, bracketed, parenthesized,
};

/// Parsed arguments, e.g. `T = [f32, f16], B = gin, arch = "sm_90a", requires(n <= 8)`.
#[derive(Default)]
pub struct KernelArgs {
    /// Each generic parameter with its listed types or constants.
    pub lists: Vec<(Ident, Vec<GenericArgument>)>,
    /// The generic parameter for GIN's back end: the `B` of `B = gin`.
    pub gin: Option<Ident>,
    /// The architecture that the kernel needs.
    pub arch: Option<LitStr>,
    /// The maximum block size, in threads.
    pub max_threads: Option<u32>,
    /// The minimum number of blocks of the maximum size for which a multiprocessor has room.
    pub min_blocks: Option<u32>,
    /// Blocks per cluster.
    pub cluster: Option<u32>,
    /// Conditions on the grid, the block and the arguments, checked by every launch.
    pub requires: Vec<Expr>,
    /// Whether a safe launch may pass the same memory in several windows.
    pub in_place: bool,
}

impl Parse for KernelArgs {
    fn parse(input: ParseStream) -> Result<Self> {
        let mut args = Self::default();
        while !input.is_empty() {
            args.parse_one(input)?;
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(args)
    }
}

impl KernelArgs {
    fn parse_one(&mut self, input: ParseStream) -> Result<()> {
        let name: Ident = input.parse()?;
        if name == "in_place" {
            self.in_place = true;
            return Ok(());
        }
        if name == "requires" {
            let conditions;
            parenthesized!(conditions in input);
            self.requires.extend(Punctuated::<Expr, Token![,]>::parse_terminated(&conditions)?);
            return Ok(());
        }
        input.parse::<Token![=]>()?;
        if name == "arch" {
            self.set_arch(name, input.parse()?)
        } else if name == "max_threads" {
            let text = "a block has 1 to 1024 threads";
            set_count(&mut self.max_threads, name, &input.parse()?, 1024, text)
        } else if name == "min_blocks" {
            if self.max_threads.is_none() {
                let text = "`min_blocks` follows `max_threads`, the size of the blocks";
                return Err(Error::new(name.span(), text));
            }
            let text = "a multiprocessor has room for 1 to 32 blocks";
            set_count(&mut self.min_blocks, name, &input.parse()?, 32, text)
        } else if name == "cluster" {
            let text = "a cluster has 1 to 8 blocks";
            set_count(&mut self.cluster, name, &input.parse()?, 8, text)
        } else if input.peek(Ident) {
            self.set_gin(name, &input.parse()?)
        } else {
            let list;
            bracketed!(list in input);
            let values = Punctuated::<GenericArgument, Token![,]>::parse_terminated(&list)?;
            if values.is_empty() {
                return Err(Error::new(name.span(), format!("list at least one `{name}`")));
            }
            self.reject_duplicate(&name)?;
            self.lists.push((name, values.into_iter().collect()));
            Ok(())
        }
    }

    fn set_gin(&mut self, name: Ident, value: &Ident) -> Result<()> {
        if value != "gin" {
            let text = format!(
                "list the values of `{name}`, as in `{name} = [f32, f16]`, or write `{name} = gin` \
                 for the back ends of GIN"
            );
            return Err(Error::new(value.span(), text));
        }
        self.reject_duplicate(&name)?;
        if let Some(other) = &self.gin {
            let text = format!("`{other}` is GIN's back end already");
            return Err(Error::new(name.span(), text));
        }
        self.gin = Some(name);
        Ok(())
    }

    fn reject_duplicate(&self, name: &Ident) -> Result<()> {
        if self.gin.as_ref() == Some(name) || self.lists.iter().any(|(listed, _)| listed == name) {
            return Err(Error::new(name.span(), format!("`{name}` is listed twice")));
        }
        Ok(())
    }

    fn set_arch(&mut self, name: Ident, arch: LitStr) -> Result<()> {
        if self.arch.is_some() {
            return Err(Error::new(name.span(), "`arch` is given twice"));
        }
        let text = arch.value();
        let digits = text.strip_prefix("sm_").unwrap_or_default().trim_end_matches(['a', 'f']);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Error::new(
                arch.span(),
                "an architecture reads like \"sm_90\" or \"sm_90a\"",
            ));
        }
        self.arch = Some(arch);
        Ok(())
    }
}

/// Sets a number from 1 to `max`, which may be given once.
fn set_count(
    count: &mut Option<u32>,
    name: Ident,
    number: &LitInt,
    max: u32,
    error: &str,
) -> Result<()> {
    if count.is_some() {
        return Err(Error::new(name.span(), format!("`{name}` is given twice")));
    }
    *count = number.base10_parse().ok().filter(|number| (1..=max).contains(number));
    count.map(drop).ok_or_else(|| Error::new(number.span(), error))
}
