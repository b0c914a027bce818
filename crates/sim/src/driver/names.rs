//! Names and messages of driver errors.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use devcomm_sys::driver::CUresult;
use litemap::LiteMap;
use parking_lot::Mutex;

use super::CudaError;

thread_local! {
    /// This thread's last error with a message of its own.
    static LAST: RefCell<Option<(CUresult, CString)>> = const { RefCell::new(None) };
}

/// Keeps an error's message for `cuGetErrorString`.
pub(super) fn remember(error: CudaError) {
    let text = error.text.map(|text| (error.code, c_string(&text)));
    let _ = LAST.try_with(|last| last.replace(text));
}

fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// The name of an error, such as `CUDA_ERROR_NOT_READY`, kept for the life of the process.
fn name_of(error: CUresult) -> *const c_char {
    static NAMES: Mutex<LiteMap<u32, CString>> = Mutex::new(LiteMap::new());
    let mut names = NAMES.lock();
    // Names are never removed, and their bytes do not move with the map's entry.
    names.entry(error as u32).or_insert_with(|| c_string(&format!("{error:?}"))).as_ptr()
}

pub(super) unsafe fn error_name(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller's contract.
    unsafe { text.write(name_of(error)) };
    CUresult::CUDA_SUCCESS
}

/// The message of this thread's last error if it has that code, else the code's name. Valid until
/// the thread's next call.
pub(super) unsafe fn error_string(error: CUresult, text: *mut *const c_char) -> CUresult {
    let own = |last: &RefCell<Option<(CUresult, CString)>>| {
        let last = last.borrow();
        last.as_ref().filter(|(code, _)| *code == error).map(|(_, text)| text.as_ptr())
    };
    let own = LAST.try_with(own).ok().flatten();
    // SAFETY: the caller's contract.
    unsafe { text.write(own.unwrap_or_else(|| name_of(error))) };
    CUresult::CUDA_SUCCESS
}
