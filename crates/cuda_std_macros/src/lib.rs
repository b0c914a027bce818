//! The macros of `cuda_std`: [`macro@kernel`], [`macro@KernelParam`], [`macro@address_space`],
//! [`macro@track_callers`], [`print!`] and [`println!`]; and `devcomm`'s [`macro@test`].
//!
//! Use them through these crates, which re-export them; the code they generate names `::cuda_std`,
//! a kernel for GIN `::nccl_device`, and a test `::devcomm`.
//!
//! # Safety model
//!
//! The body of a safe function stays safe code. Every parameter must implement `KernelParam`, the
//! unsafe trait that promises that the bytes which the host passes are a valid value on the device.
//!
//! # Example
//!
//! ```text
//! use cuda_std::prelude::*;
//!
//! #[kernel(T = [f32, f16, bf16])]
//! pub unsafe fn fill<T: Copy>(out: *mut T, value: T, count: usize) { /* .. */ }
//! // GPU entry points fill_f32, fill_f16 and fill_bf16; on the host fill::<f32>::args(..)
//! ```

mod address_space;
mod args;
mod generate;
mod instances;
mod meta;
mod param;
mod print;
mod requires;
mod test;

use proc_macro::TokenStream;

/// Makes a function a GPU entry point, and on the host a type of the same name that launches it.
///
/// On nvptx64 the function becomes an `extern "ptx-kernel"` function, and a record of it (name,
/// file, parameters) goes into the section that `cuda_builder` reads. On the host the type
/// implements `Kernel` (all that a launch needs) and `HostKernel` (the body, for a simulator); its
/// function `args` takes the launch's arguments.
///
/// Entry points of a crate have different names, whatever modules they are in: a second one with
/// the same name is an error, also on the host (``the name `__kernel_named_fill` is defined
/// multiple times``).
///
/// A package of kernels may depend on another one and call its functions: `cuda_builder` compiles
/// the entry points of the package that it was asked for only.
///
/// # Arguments
///
/// * `T = [f32, f16, bf16]`: the instances of a generic kernel, one list for each type or const
///   parameter. Each combination becomes an entry point such as `name_f32`; on the host it is
///   `name::<f32>`. The body is compiled once per instance, with `T` as an alias, so
///   `shared_array![T; 32]` works in it.
/// * `B = gin`: the kernel is compiled for every back end of GIN, with `B` as one of the types of
///   `nccl_device::gin`. The entry points' names end with `_proxy`, `_gdaki`, `_gpi` and
///   `_efa_gda`. The host's type has no such parameter: a launch selects the entry point by the
///   device communicator. On the host the body runs with `Proxy`.
/// * `arch = "sm_90a"`: the architecture that the kernel's file needs, if not the build's default.
/// * `cluster = 2`: the number of blocks per cluster, which launches cannot change; the grid is a
///   multiple of it. Needs sm_90.
/// * `max_threads = 256`: the maximum threads per block of a launch. The compiler may use as many
///   registers per thread as fit that block size. PTX: `.maxntid`.
/// * `min_blocks = 1`, after `max_threads`: the minimum number of blocks of that size for which a
///   multiprocessor has room. It limits the registers; 1 keeps the compiler from spilling registers
///   to make room for more blocks. PTX: `.minnctapersm`.
/// * `requires(out.len() <= send.len(), grid.count() == 1)`: conditions on the arguments, and on
///   `grid` and `block`, the launch's `Dim3`s. A launch that does not meet one is an error. The
///   host checks the conditions, so they call `const` functions only, and cannot use what only a
///   running kernel has, such as a thread's index or an element of a window. They can use the
///   `len()` of a slice, and the fields of a struct with a slice. A comparison in which `+`, `-`,
///   `*`, `/` or `%` of integers overflows is not met; within a call or a cast, after `!` or
///   beside `||` they overflow as elsewhere.
/// * `in_place`: windows may share memory. Without it a launch of a safe kernel with the same
///   memory in two windows is an error.
///
/// # Errors
///
/// These do not compile: a kernel that is async, const, variadic or a method, returns a value, or
/// takes a pattern other than a name, more than 12 parameters, a lifetime, a mutable reference, a
/// reference to anything but a slice, or a generic parameter without a list; a kernel for GIN
/// without a `DevComm` parameter.
///
/// # Slices
///
/// A parameter `&[T]`, or a struct with one in it, makes the launch unsafe: it is an address and a
/// length. Nothing may write the elements while the kernel runs, neither the kernel through another
/// pointer nor a peer rank: so never pass a window's memory. Write results through a `*mut T`.
#[proc_macro_attribute]
pub fn kernel(attr: TokenStream, item: TokenStream) -> TokenStream {
    let args = syn::parse_macro_input!(attr as args::KernelArgs);
    let function = syn::parse_macro_input!(item as syn::ItemFn);
    let source = meta::Source::of(proc_macro::Span::call_site());
    generate::kernel(args, function, &source)
        .unwrap_or_else(|error| error.to_compile_error())
        .into()
}

/// Lets kernels take a struct as a parameter: for kernels with many parameters.
///
/// The struct must be `#[repr(C)]`, and its fields' types must be `KernelParam` too. For a struct
/// `Name` a launch passes a `NameArgs`: a struct with the same fields, each with its host value.
///
/// ```text
/// #[repr(C)]
/// #[derive(Clone, Copy, KernelParam)]
/// pub struct Job { out: Window<f32>, count: usize, scale: f32 }
/// // scale_all::args(&dev, JobArgs { out: &window, count: 100, scale: 2.0 })
/// ```
#[proc_macro_derive(KernelParam)]
pub fn kernel_param(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    param::derive(&input).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Puts a static into an address space of the GPU: `shared`, `global` or `constant`, named as in
/// the Rust-CUDA project.
///
/// `#[address_space(shared)] static mut TILE: [f32; 256] = [0.0; 256];` is one array per block. Its
/// contents are undefined at first, whatever the initialiser says. `TILE[i]` and
/// `TILE.as_mut_ptr()` access the elements; `&raw mut TILE` points to a wrapper type instead. The
/// simulator has one array per block too, but does not check the accesses to it. It does check
/// accesses to an array of `cuda_std`'s `shared_array!`.
///
/// `global` and `constant` change nothing: every other static is in global memory. On a GPU each
/// file of kernels has a static of its own, for all its launches there; in the simulator one static
/// is for all files and ranks.
///
/// # Errors
///
/// These do not compile: another address space, and a shared static without `mut`.
#[proc_macro_attribute]
pub fn address_space(attr: TokenStream, item: TokenStream) -> TokenStream {
    let space = syn::parse_macro_input!(attr as syn::Ident);
    let item = syn::parse_macro_input!(item as syn::ItemStatic);
    address_space::expand(&space, &item).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Marks every function of an `impl` block `#[track_caller]`: the simulator's reports, and the
/// panics of debug builds, then name the line of the kernel that calls it.
#[proc_macro_attribute]
pub fn track_callers(_: TokenStream, item: TokenStream) -> TokenStream {
    let mut block = syn::parse_macro_input!(item as syn::ItemImpl);
    for item in &mut block.items {
        if let syn::ImplItem::Fn(function) = item {
            function.attrs.push(syn::parse_quote!(#[track_caller]));
        }
    }
    quote::quote!(#block).into()
}

/// Prints from a kernel, without a newline. See `println!`.
#[proc_macro]
pub fn print(input: TokenStream) -> TokenStream {
    let call = syn::parse_macro_input!(input as print::Print);
    call.expand("").unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Prints a line from a kernel, for debugging.
///
/// It takes `{}` and `{name}` with numbers, `bool` and raw pointers, and no format options; `{:?}`
/// is the same as `{}`. On the GPU the text goes through CUDA's printf buffer and appears when the
/// host synchronises; on the host it goes to the simulator.
#[proc_macro]
pub fn println(input: TokenStream) -> TokenStream {
    let call = syn::parse_macro_input!(input as print::Print);
    call.expand("\n").unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Makes a function a test that runs on every rank: `#[devcomm::test(ranks = 4)]`.
///
/// The function takes a `&devcomm::Rank`, and returns nothing or a `Result` whose error is
/// `devcomm::Error` or made from it, such as `anyhow::Error`. The test fails if a rank returns an
/// error or panics.
///
/// ```text
/// #[devcomm::test(ranks = 4)]
/// fn every_rank_meets_the_others(rank: &Rank) -> Result<(), Error> {
///     rank.barrier()
/// }
/// ```
///
/// It runs once on GPUs if this system has enough of them, with the ranks as threads, and prints
/// `GPU-TEST name: ran`; under a launcher (mpirun, torchrun, ..) as one rank of the job. Otherwise
/// it runs on simulated GPUs, under several schedules: a fixed order, one that preempts threads at
/// each access, three random ones and four in which a thread, a warp, a block or a rank lags far
/// behind. A failure there ends with the settings that repeat it. If there are GPUs, but no NCCL,
/// or the test loads `devcomm::WITHOUT_PTX`, it runs on simulated ones, and prints `GPU-TEST name:
/// simulated (reason)`.
///
/// # Arguments
///
/// * `ranks = 4`: the number of ranks. Required.
/// * `simulate = "team=2,network=rail"`: more settings of the simulated machine, in the text form
///   of `devcomm::Simulation`.
///
/// # Environment
///
/// * `DEVCOMM_SIMULATE="4,seed=17"`: runs one schedule, on a machine with these settings. A test of
///   another number of ranks runs under all its schedules. Neither uses real GPUs.
/// * `DEVCOMM_SCHEDULES=1000`: the number of random schedules, and of those with a lag.
/// * `DEVCOMM_TEST_GPUS`: `0` simulates even if there are GPUs; `1` does not simulate, but prints
///   `GPU-TEST name: skipped (reason)` if there are too few, and fails without PTX or NCCL.
///
/// # Errors
///
/// These do not compile: a function that is async, generic, or has another number of parameters
/// than one.
#[proc_macro_attribute]
pub fn test(attr: TokenStream, item: TokenStream) -> TokenStream {
    let args = syn::parse_macro_input!(attr as test::TestArgs);
    let function = syn::parse_macro_input!(item as syn::ItemFn);
    test::expand(&args, &function).unwrap_or_else(|error| error.to_compile_error()).into()
}
