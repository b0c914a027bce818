//! NCCL's parameter API, with the parameters of NCCL's log. They have no effect: the simulator
//! writes no log.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use devcomm_sys::nccl::{ParamHandle, SUCCESS};

use super::call::{INVALID_ARGUMENT, NcclError, NcclResult, record_error};

/// The names and default values of the parameters.
const PARAMETERS: [(&CStr, &str); 7] = [
    (c"NCCL_DEBUG", ""),
    (c"NCCL_DEBUG_FILE", ""),
    (c"NCCL_DEBUG_SUBSYS", ""),
    (c"NCCL_DEBUG_LEVELS", ""),
    (c"NCCL_DEBUG_TIMESTAMP_FORMAT", "[%F %T] "),
    (c"NCCL_DEBUG_TIMESTAMP_LEVELS", "WARN"),
    (c"NCCL_SET_THREAD_NAME", "0"),
];

thread_local! {
    /// The strings last returned to the calling thread, valid until its next call.
    static RETURNED: RefCell<(Vec<*const c_char>, CString)> = RefCell::default();
}

fn value_of(index: usize) -> String {
    let (name, default) = PARAMETERS[index];
    let set = name.to_str().ok().and_then(|name| std::env::var(name).ok());
    set.unwrap_or_else(|| default.to_owned())
}

/// Returns the index of the parameter with a name.
///
/// # Safety
///
/// `key` is NUL-terminated.
unsafe fn index_of(key: *const c_char) -> NcclResult<usize> {
    // SAFETY: the caller passes text with a zero at its end.
    let key = unsafe { CStr::from_ptr(key) };
    let found = PARAMETERS.iter().position(|(name, _)| *name == key);
    found.ok_or_else(|| NcclError::argument(format!("no parameter is called {key:?}")))
}

/// Returns the index of a handle's parameter: a handle is the index plus 1.
fn index(handle: ParamHandle) -> NcclResult<usize> {
    let index = handle.addr().checked_sub(1).filter(|index| *index < PARAMETERS.len());
    index.ok_or_else(|| NcclError::argument("not a parameter handle"))
}

fn run(name: &str, body: impl FnOnce() -> NcclResult<()>) -> c_int {
    body().map_or_else(|error| record_error(name, error), |()| SUCCESS)
}

/// Stores a string to be returned to the calling thread.
fn store_string(text: String) -> *const c_char {
    let text = CString::new(text).unwrap_or_default();
    RETURNED.with_borrow_mut(|returned| {
        returned.1 = text;
        returned.1.as_ptr()
    })
}

pub(super) unsafe extern "C" fn keys(table: *mut *mut *const c_char, len: *mut c_int) -> c_int {
    RETURNED.with_borrow_mut(|returned| {
        returned.0 = PARAMETERS.iter().map(|(name, _)| name.as_ptr()).collect();
        // SAFETY: the program passes valid out pointers and keys, as NCCL requires.
        unsafe {
            table.write(returned.0.as_mut_ptr());
            len.write(returned.0.len() as c_int);
        }
    });
    SUCCESS
}

pub(super) unsafe extern "C" fn parameter(
    key: *const c_char,
    value: *mut *const c_char,
    len: *mut c_int,
) -> c_int {
    run("ncclParamGetParameter", || {
        // SAFETY: the program passes valid out pointers and keys, as NCCL requires.
        let text = value_of(unsafe { index_of(key) }?);
        // SAFETY: the program passes valid out pointers and keys, as NCCL requires.
        unsafe {
            len.write(text.len() as c_int);
            value.write(store_string(text));
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn dump_all() {
    for (index, (name, _)) in PARAMETERS.iter().enumerate() {
        println!("{}={}", name.to_string_lossy(), value_of(index));
    }
}

pub(super) unsafe extern "C" fn bind(out: *mut ParamHandle, key: *const c_char) -> c_int {
    run("ncclParamBind", || {
        // SAFETY: the program passes valid out pointers and keys, as NCCL requires.
        unsafe {
            out.write(null_mut());
            out.write(std::ptr::without_provenance_mut(index_of(key)? + 1));
        }
        Ok(())
    })
}

/// Declares the numeric getters.
macro_rules! numeric_getters {
    ($( $name:ident $symbol:literal $type:ty; )*) => { $(
        pub(super) unsafe extern "C" fn $name(handle: ParamHandle, out: *mut $type) -> c_int {
            run($symbol, || {
                let text = value_of(index(handle)?);
                let number = text.trim().parse().map_err(|_| {
                    NcclError::argument(format!("{text:?} is not of type {}", stringify!($type)))
                })?;
                // SAFETY: the program passes valid out pointers and keys, as NCCL requires.
                unsafe { out.write(number) };
                Ok(())
            })
        }
    )* };
}

numeric_getters! {
    get_i8 "ncclParamGetI8" i8;
    get_i16 "ncclParamGetI16" i16;
    get_i32 "ncclParamGetI32" i32;
    get_i64 "ncclParamGetI64" i64;
    get_u8 "ncclParamGetU8" u8;
    get_u16 "ncclParamGetU16" u16;
    get_u32 "ncclParamGetU32" u32;
    get_u64 "ncclParamGetU64" u64;
}

pub(super) unsafe extern "C" fn get_str(handle: ParamHandle, out: *mut *const c_char) -> c_int {
    run("ncclParamGetStr", || {
        let text = value_of(index(handle)?);
        // SAFETY: the program passes valid out pointers and keys, as NCCL requires.
        unsafe { out.write(store_string(text)) };
        Ok(())
    })
}

/// Writes the value's text, without a NUL.
pub(super) unsafe extern "C" fn get(
    handle: ParamHandle,
    out: *mut c_void,
    max_len: c_int,
    len: *mut c_int,
) -> c_int {
    run("ncclParamGet", || {
        let text = value_of(index(handle)?);
        // SAFETY: the program passes valid out pointers and keys, as NCCL requires.
        unsafe { len.write(text.len() as c_int) };
        if text.len() > usize::try_from(max_len).unwrap_or(0) {
            let n = text.len();
            return Err(NcclError::new(INVALID_ARGUMENT, format!("{n} bytes for {max_len}")));
        }
        // SAFETY: the program passes a buffer of `max_len` bytes, as NCCL requires; the text fits.
        unsafe { out.cast::<u8>().copy_from(text.as_ptr(), text.len()) };
        Ok(())
    })
}
