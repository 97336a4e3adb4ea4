// E0277: cannot be sent between threads safely
// The current stream belongs to a thread, and so does the guard that restores the previous one.
use tch_extension::cuda::StreamGuard;

fn move_away(guard: StreamGuard) {
    std::thread::spawn(move || drop(guard));
}

fn main() {
    let _ = move_away;
}
