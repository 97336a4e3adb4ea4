// E0277: cannot be sent between threads safely
// The current stream is a thread's own; so is what puts the one before back.
use tch_extension::cuda::StreamGuard;

fn move_away(guard: StreamGuard) {
    std::thread::spawn(move || drop(guard));
}

fn main() {
    let _ = move_away;
}
